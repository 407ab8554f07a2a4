// The neighbourhoods of the search: the changes of a plan that a round can make. The file also has the
// changes that then bring the plan within the budget.
#include <algorithm>

#include "planner/search.h"

namespace teraio {
// Issues a fetch earlier: either by a random time, or as early as there is room for the tensor. After a
// random time, the tensor may not fit; make_room() then makes room.
void Search::hasten(int32_t at) {
  const int32_t index = gaps_[static_cast<size_t>(at)];
  if (!transfers_[static_cast<size_t>(at)].fetch) return;
  Absence absence = now_[index];
  if (!absence.evicted || absence.trigger <= absence.free + 1) return;
  const int64_t late_ns = read_ns(index) * (1 + below(8)) / 2;
  const int32_t wanted = last_before(entered(absence.trigger) - late_ns);
  const int32_t lowest = absence.free + 1;
  absence.trigger = std::clamp(wanted, lowest, absence.trigger - 1);
  if (below(4) == 0) {  // in a quarter of the calls, issue only as early as there is room
    const int32_t room = now_.earliest(lowest, now_[index].trigger, gap(index).size_bytes);
    absence.trigger = std::min(room, now_[index].trigger);
  }
  now_.set(index, absence);
  touched_.push_back(index);
}

// Issues a fetch later, closer to the tick that needs the tensor, so that the lane can serve other transfers
// earlier. Calls rewrite() for an eviction.
void Search::postpone(int32_t at) {
  const int32_t index = gaps_[static_cast<size_t>(at)];
  if (!transfers_[static_cast<size_t>(at)].fetch) return rewrite(at);
  Absence absence = now_[index];
  const int32_t end = gap(index).end;
  if (!absence.evicted || absence.trigger >= end) return;
  const int32_t wanted = last_before(entered(end) - read_ns(index) * (1 + below(6)) / 2);
  absence.trigger =
      wanted > absence.trigger ? std::min(wanted, end) : absence.trigger + 1 + below(end - absence.trigger);
  now_.set(index, absence);
  touched_.push_back(index);
}

void Search::bring_home(int32_t at) {
  const int32_t index = gaps_[static_cast<size_t>(at)];
  if (now_[index].evicted) bring(index);
}

void Search::evict_something(int32_t tick) {
  const int32_t index = gap_over(tick);
  if (index >= 0) send(index, -1);
}

// Issues an eviction at another tick, or frees the tensor's bytes at another tick.
void Search::rewrite(int32_t at) {
  const int32_t index = gaps_[static_cast<size_t>(at)];
  Absence absence = now_[index];
  if (!absence.evicted || !now_.writes(index)) return;
  const Gap& it = gap(index);
  // Do not issue the eviction before the gap, because the engine evicts no tensor in use. The engine does not
  // even copy a tensor while a kernel only reads it.
  const int32_t soonest = std::max(it.start + 1, absence.free - instance_.ticks() + 1);
  switch (below(4)) {
    case 0: absence.out = std::max(soonest, absence.free - instance_.ticks() + 1); break;
    case 1: absence.out = std::min(it.start + 1, absence.free); break;
    case 2: absence.out = soonest + below(absence.free - soonest + 1); break;
    default: break;
  }
  const int32_t wanted = last_before(entered(absence.out) + write_ns(index) * (2 + below(8)) / 2) + 1;
  const int32_t most = std::min(absence.trigger - 1, absence.out + instance_.ticks() - 1);
  if (below(4) != 0) absence.free = std::clamp(wanted, std::max(it.start + 1, absence.out), most);
  now_.set(index, absence);
  touched_.push_back(index);
}

// Gives a tensor another tier. If this tier is full, moves tensors of this tier to the tensor's old tier,
// until there is room or 12 tries fail.
void Search::reroute(int32_t at) {
  const int32_t index = gaps_[static_cast<size_t>(at)];
  const int32_t tensor = gap(index).tensor;
  const int32_t before = now_.route(tensor);
  const int32_t other = (before + 1 + below(instance_.routes() - 1)) % instance_.routes();
  for (int32_t tries = 0; !now_.place(tensor, other); ++tries) {
    if (tries == 12) return;
    const int32_t candidate = gaps_[static_cast<size_t>(below(static_cast<int32_t>(gaps_.size())))];
    if (now_.route(gap(candidate).tensor) != other || !now_.place(gap(candidate).tensor, before)) continue;
    touched_.push_back(candidate);
  }
  touched_.push_back(index);
}

// Changes absences until the device's ledger is within the budget. Each change (1) frees a tensor earlier,
// (2) issues a fetch later, or (3) evicts another tensor. Returns false if the ledger remains above the
// budget.
bool Search::make_room() {
  for (int tries = 0; now_.over(); ++tries) {
    if (tries == 48) return false;
    const int32_t tick = now_.fullest();
    if (below(2) == 0 && tighten(tick)) continue;
    const int32_t index = gap_over(tick);
    if (index >= 0 && send(index, tick)) continue;
    if (!tighten(tick) && tries > 12) return false;
  }
  return true;
}

// Extends a random absence so that it covers this tick. The tick is in the gap of the absence, but the tensor
// was still or already resident. Returns false if no draw finds such an absence.
bool Search::tighten(int32_t tick) {
  const int32_t count = static_cast<int32_t>(gaps_.size());
  if (count == 0) return false;
  for (int32_t tries = 0; tries < 24; ++tries) {
    const int32_t index = gaps_[static_cast<size_t>(below(count))];
    Absence absence = now_[index];
    if (!absence.evicted) continue;
    const Gap& it = gap(index);
    const int32_t here = unrolled(it, tick);
    if (here >= it.end || (absence.free <= here && here < absence.trigger)) continue;
    if (here >= absence.trigger) {
      absence.trigger = here + 1;
    } else {
      absence.free = here;
      absence.out = std::min(absence.out, here);
    }
    now_.set(index, absence);
    touched_.push_back(index);
    return true;
  }
  return false;
}

// Draws a gap that contains this tick and has no absence. Large tensors are drawn more often. Returns -1 if
// no draw finds such a gap.
int32_t Search::gap_over(int32_t tick) {
  for (int32_t tries = 0; tries < 48; ++tries) {
    const auto drawn = static_cast<int64_t>(draw() % static_cast<uint64_t>(sizes_.back()));
    const auto index =
        static_cast<int32_t>(std::upper_bound(sizes_.begin(), sizes_.end(), drawn) - sizes_.begin());
    if (!now_[index].evicted && unrolled(gap(index), tick) < gap(index).end) return index;
  }
  return -1;
}

bool Search::find_tier(int32_t index) {
  const int32_t tensor = gap(index).tensor, routes = instance_.routes();
  if (now_.route(tensor) >= 0) return true;
  const int32_t first = routes > 0 ? below(routes) : 0;
  for (int32_t i = 0; i < routes; ++i)
    if (now_.place(tensor, (first + i) % routes)) return true;
  return false;
}

// Evicts a tensor in a gap. Leaves time for the write before the bytes are freed, and for the read before the
// tensor is needed. Unless `tick` is -1, the absence covers `tick`, even if compute must then wait.
bool Search::send(int32_t index, int32_t tick) {
  if (!find_tier(index)) return false;
  const Gap& it = gap(index);
  const int32_t before = now_.writer(it.version);
  const bool writes = it.version >= 0 && (before < 0 || gap(before).age > it.age);
  Absence absence{true, it.start + 1, it.start + 1, it.end};
  if (writes) absence.free = last_before(entered(it.start + 1) + write_ns(index) * (2 + below(6)) / 2) + 1;
  absence.trigger = last_before(entered(it.end) - read_ns(index) * (2 + below(8)) / 2);
  if (tick >= 0) {
    const int32_t here = unrolled(it, tick);
    absence.free = std::min(absence.free, here);
    absence.trigger = std::max(absence.trigger, here + 1);
  }
  absence.free = std::clamp(absence.free, it.start + 1, it.end - 1);
  absence.trigger = std::clamp(absence.trigger, absence.free + 1, it.end);
  now_.set(index, absence);
  touched_.push_back(index);
  if (writes && before >= 0) {  // the absence that wrote the copy is later, and now only drops the tensor
    Absence dropped = now_[before];
    dropped.out = dropped.free = gap(before).start + 1;
    now_.set(before, dropped);
  }
  return true;
}

// Keeps the tensor resident in a gap. If this gap's absence wrote the version's copy, the next absence of the
// version writes the copy.
void Search::bring(int32_t index) {
  const int32_t version = gap(index).version;
  const bool wrote = now_.writes(index);
  Absence absence = now_[index];
  absence.evicted = false;
  now_.set(index, absence);
  touched_.push_back(index);
  if (wrote) write_anew(version);
}

// Sets the ticks of the absence that now writes the version's copy. Leaves time for the write before the
// bytes are freed.
void Search::write_anew(int32_t version) {
  const int32_t index = now_.writer(version);
  if (index < 0) return;
  const Gap& it = gap(index);
  Absence absence = now_[index];
  absence.out = it.start + 1;
  const int32_t wanted = last_before(entered(it.start + 1) + write_ns(index) * 2) + 1;
  absence.free = std::clamp(wanted, it.start + 1, absence.trigger - 1);
  absence.out = std::min(absence.out, absence.free);
  now_.set(index, absence);
}

// Gives the transfers of an absence more time if the device has room: issues the fetch earlier, and frees the
// bytes later.
void Search::widen(int32_t index) {
  Absence absence = now_[index];
  if (!absence.evicted) return;
  const Gap& it = gap(index);
  const int32_t wanted = last_before(entered(it.end) - read_ns(index) * (2 + below(12)) / 2);
  const int32_t lowest = std::max(wanted, absence.free + 1);
  if (lowest < absence.trigger) {
    absence.trigger = now_.earliest(lowest, absence.trigger, it.size_bytes);
    now_.set(index, absence);
  }
  if (!now_.writes(index)) return;
  const int32_t done = last_before(entered(absence.out) + write_ns(index) * (2 + below(6)) / 2) + 1;
  const int32_t most = std::min({done, absence.trigger - 1, absence.out + instance_.ticks() - 1});
  if (most <= absence.free) return;
  absence.free = now_.latest(absence.free, most, it.size_bytes);
  now_.set(index, absence);
}
}  // namespace teraio
