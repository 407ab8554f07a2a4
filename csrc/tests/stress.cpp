// A stress test of the transfer engine for the sanitizers. Many threads make all calls concurrently, while
// operations fail by injected faults.
//
//   cmake -S csrc -B build/tsan -DTERAIO_STRESS=ON -DTERAIO_SANITIZE=thread && cmake --build build/tsan
//   build/tsan/stress DIRECTORY [ROUNDS]
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "io/fault_io.h"
#include "io/thread_io.h"
#include "transfer/transfers.h"

using namespace teraio;

namespace {
constexpr uint64_t kSlab = 64 * 1024;
std::atomic<uint64_t> wrong{0}, right{0}, failed{0}, cancelled{0};

State wait_for(Transfers& engine, uint64_t ticket) {
  State state;
  while ((state = engine.wait(ticket, 50'000'000)) == State::active) {}
  engine.release(ticket);
  return state;
}

void worker(Transfers& engine, int number, int rounds) {
  std::minstd_rand draw(static_cast<unsigned>(number) + 1);
  std::vector<std::byte> source(5 * kSlab + 77), target(source.size());
  const uint64_t base = static_cast<uint64_t>(number) * 16 * kSlab;
  const auto address = [](std::vector<std::byte>& v) { return reinterpret_cast<uint64_t>(v.data()); };
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < source.size(); i += 97) source[i] = static_cast<std::byte>(draw());
    const std::vector<Piece> pieces = {{number % 2, base, 3 * kSlab}, {1 - number % 2, base, 2 * kSlab + 77}};
    const auto generation = static_cast<uint64_t>(round);
    const auto tag = static_cast<uint64_t>(number);
    const uint64_t out =
        engine.submit({Op::write, address(source), source.size(), &pieces, tag, generation, false, 0, 0});
    if (draw() % 8 == 0) engine.cancel(out);
    engine.stats();
    const State wrote = wait_for(engine, out);
    cancelled += wrote == State::cancelled ? 1 : 0;
    const uint64_t in = engine.submit(
        {Op::read, address(target), target.size(), &pieces, tag, generation, draw() % 2 == 0, 0, 0});
    if (draw() % 4 == 0) engine.promote(in);
    engine.state(in);
    const State read = wait_for(engine, in);
    failed += read == State::failed ? 1 : 0;
    if (read != State::done) continue;
    // The fetch has succeeded. This is right after a complete eviction, even if it was cancelled. It is wrong
    // after a failed eviction.
    (wrote != State::failed && source == target ? right : wrong) += 1;
  }
}

void saboteur(FaultIo& fault, std::atomic<bool>& stop) {
  std::minstd_rand draw(99);
  const Fault kinds[] = {Fault::error, Fault::shorten, Fault::delay, Fault::flip, Fault::stale, Fault::drop};
  int drops = 0;
  while (!stop) {
    Rule rule;
    rule.fault = kinds[draw() % 6];
    if (rule.fault == Fault::drop && ++drops > 4) continue;
    rule.op = draw() % 2 == 0 ? Op::read : Op::write;
    rule.nth = 1 + draw() % 3;
    rule.error = EIO;
    rule.delay_ns = 2'000'000;
    fault.add(rule);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    fault.clear();
    if (rule.fault != Fault::drop) continue;
    // Longer than the deadline, so that the flight of the dropped operation is abandoned.
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    fault.deliver();
  }
}
}  // namespace

int main(int count, char** arguments) {
  if (count < 2) return std::printf("usage: stress DIRECTORY [ROUNDS]\n"), 2;
  const int rounds = count > 2 ? std::atoi(arguments[2]) : 200;
  std::vector<std::pair<int, std::string>> files;
  for (int i = 0; i < 2; ++i) {
    const std::string path = std::string(arguments[1]) + "/stress" + std::to_string(i);
    files.emplace_back(open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600), path);
    unlink(path.c_str());
  }
  auto fault = std::make_shared<FaultIo>(std::make_shared<ThreadIo>(files, 4));
  for (const auto& file : files) close(file.first);
  Settings settings;
  settings.deadline_ns = 200'000'000;
  auto engine = std::make_shared<Transfers>(fault, std::make_shared<Slabs>(kSlab, 24),
                                            std::make_shared<HostCopier>(), settings);
  std::atomic<bool> stop{false};
  std::thread trouble([&] { saboteur(*fault, stop); });
  std::vector<std::thread> workers;
  for (int i = 0; i < 6; ++i) workers.emplace_back([&, i] { worker(*engine, i, rounds); });
  for (auto& thread : workers) thread.join();
  stop = true;
  trouble.join();
  fault->deliver();
  const bool joined = engine->close(5'000'000'000);
  std::printf("right %lu wrong %lu failed %lu cancelled %lu late %lu joined %d\n", right.load(), wrong.load(),
              failed.load(), cancelled.load(), engine->stats().late, joined);
  return wrong == 0 && joined && right > 0 ? 0 : 1;
}
