"""Tests of synthetic profiles. Parameter counts equal published counts, durations equal sums by hand, and
files are reproducible."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
import tree

from teraio.cli import main
from teraio.errors import OptionError
from teraio.formats import shipped_files
from teraio.formats.machine import Machine
from teraio.formats.profile import Profile, Tensor
from teraio.passes.planner.problem import problem
from teraio.passes.synth import models, profiles, roofline
from teraio.passes.synth.models import Decoder

FOLDER = tree.ROOT / "profiles"
TOY = Decoder(vocabulary=10, hidden=4, layers=3, heads=2, kv_heads=1, head_size=2, ffn=8, default_sequence=6)
# The rate is 1 operation per nanosecond. Kernels without a matrix product take 1 ns.
FREE = roofline.Rates(10**9, 10**18, 0)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(models.MODELS, "toy", (TOY, 0))
    return "toy"


def products_ns(profile: Profile) -> int:
    return sum(kernel.duration_ns for kernel in profile.kernels if kernel.duration_ns > 1)


def by_name(profile: Profile) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in profile.tensors}


def commands() -> dict[str, list[str]]:
    """Return, by file name, the command that makes the file. The commands are in profiles/README.md."""
    lines = re.findall(r"^teraio (profile synth .*)$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    commands = [shlex.split(line) for line in lines]
    return {command[-1]: command for command in commands}


@pytest.mark.parametrize("model", models.MODELS)
def test_parameter_count_equals_published_count(model: str) -> None:
    profile = profiles.synth(model)
    assert profiles.count_parameters(profile) == models.MODELS[model][1]
    states = sum(t.size_bytes for t in profile.tensors if t.kind == "state")
    assert states == 12 * models.MODELS[model][1]  # per parameter: an fp32 master copy and two fp32 moments
    profile.validate()


def test_products_have_six_operations_per_parameter_and_token(toy: str) -> None:
    # Each layer has 144 parameters: wq 16, wk 8, wv 8, wo 16, and three matrices of 32 in the MLP. The head
    # has 40. For each parameter and token, the forward has two operations, and the backward has four.
    #
    # Attention computes 2 sequences in each layer. For each sequence, the forward has 4 * 6 * 6 * 4 / 2 = 288
    # operations, and the backward has 2.5 times as many. Other kernels count no operations.
    profile = profiles.synth(toy, profiles.ProfileRequest(batch=2, loss_chunks=3, rates=FREE))
    products = 6 * (3 * 144 + 40) * 12
    attention = 3 * 2 * 288 * 7 // 2
    assert products_ns(profile) == products + attention
    again = profiles.synth(toy, profiles.ProfileRequest(batch=2, loss_chunks=3, rates=FREE, checkpoint=True))
    once_more = 3 * (2 * 144 * 12 + 2 * 288)  # operations of the layers' forward, which runs again
    assert products_ns(again) == products_ns(profile) + once_more


def test_kernel_duration_is_the_larger_of_compute_and_memory(toy: str) -> None:
    rates = roofline.Rates(10**9, 10**9, 7)
    kernels = {
        k.name: k for k in profiles.synth(toy, profiles.ProfileRequest(loss_chunks=1, rates=rates)).kernels
    }
    # A number has 2 bytes. The kernel reads 6 tokens of 4 numbers (48 bytes) and 16 weights (32 bytes). It
    # writes 6 tokens of 4 numbers (48 bytes). This takes 128 ns. The kernel has 2 * 6 * 16 = 192 operations,
    # which take 192 ns.
    assert kernels["layers.0.wq"].duration_ns == 7 + max(128, 192)
    assert kernels["layers.0.add1"].duration_ns == 7 + 3 * 48
    assert kernels["layers.0.wq.adamw"].duration_ns == 7 + 16 * (2 + 3 * 8 + 2)


def saved_bytes(profile: Profile) -> int:
    """Return the bytes of activations that the forward makes and the backward reads."""
    calls = [kernel.call for kernel in profile.kernels]
    return sum(
        t.size_bytes for t in profile.tensors if t.kind == "activation" and calls[t.writes[0]] == 0
        and t.reads and calls[t.reads[-1]] == 1
    )  # fmt: skip


def test_saved_bytes_equal_bytes_read_by_backward(toy: str) -> None:
    # Each layer saves numbers of 2 bytes. For each token, x, norm1, q, attention, add1 and norm2 have 4
    # numbers each. k and v have 2 each, and gate, up and swiglu have 8 each.
    #
    # Each layer also saves 4 fp32 statistics per token: one for each of two norms, and one for each of 2
    # attention heads. The head of the model saves the last x and one statistic per token.
    request = profiles.ProfileRequest(loss_chunks=1)
    layer = 6 * (2 * (6 * 4 + 2 * 2 + 3 * 8) + 4 * 4)
    # The head includes the gradient of the last x, which the loss makes in the forward.
    head = 6 * (2 * 4 + 4) + 2 * 6 * 4
    assert saved_bytes(profiles.synth(toy, request)) == 3 * layer + head
    checkpointed = profiles.synth(toy, profiles.ProfileRequest(loss_chunks=1, checkpoint=True))
    # With checkpointing, each layer saves only its input.
    assert saved_bytes(checkpointed) == 3 * 6 * 2 * 4 + head


def test_gradients_are_accumulated_over_micro_batches(toy: str) -> None:
    profile = profiles.synth(toy, profiles.ProfileRequest(micro_batches=3, loss_chunks=1, clip=True))
    grad = by_name(profile)["layers.1.wq.grad"]
    calls = [kernel.call for kernel in profile.kernels]
    # Three backwards and the clipping write the gradient.
    assert [calls[tick] for tick in grad.writes] == [1, 3, 5, 6]
    # Two backwards read the gradient to add to it. The gradient's norm, the clipping and AdamW also read it.
    assert [calls[tick] for tick in grad.reads] == [3, 5, 6, 6, 6]
    assert [calls[tick] for tick in by_name(profile)["layers.1.wq"].writes] == [6]
    assert not grad.persistent


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "vit-b-16"])
def test_recompute_chain_has_its_inputs(model: str) -> None:
    """Check that each kernel of a recompute chain can run again.

    The kernel may read weights, inputs of the step, and results of the chain. It may also read tensors that
    are alive at least as long as the recomputed tensor.
    """
    profile = profiles.synth(model, profiles.ProfileRequest(batch=4, layers=2))
    reads: dict[int, list[Tensor]] = {}
    for tensor in profile.tensors:
        for tick in tensor.reads:
            reads.setdefault(tick, []).append(tensor)
    chains = [tensor for tensor in profile.tensors if tensor.recompute_from]
    assert len(chains) > 20
    for tensor in chains:
        assert tensor.kind == "activation" and set(tensor.writes) <= set(tensor.recompute_from)
        for tick in tensor.recompute_from:
            for source in reads.get(tick, []):
                made = source.writes and source.writes[0] in tensor.recompute_from
                lives = source.kind == "weight" or source.reads[-1] >= tensor.reads[-1]
                assert lives or made or source.kind == "input", (tensor.name, source.name)


def test_experts_are_read_once_per_micro_batch_and_product() -> None:
    profile = profiles.synth("qwen3-30b-a3b", profiles.ProfileRequest(layers=1))
    experts = by_name(profile)["layers.0.experts.gate_up"]
    assert experts.size_bytes == 2 * 128 * 2048 * 2 * 768
    # The forward reads the experts. The backward reads them again to compute the gradient of its input. AdamW
    # writes them.
    assert len(experts.reads) == 2 and len(experts.writes) == 1


def test_shipped_profiles_equal_output_of_their_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_by = commands()
    made = {path.name for path in FOLDER.glob("*.profile.json.gz")}
    # Only this shipped profile was measured.
    assert made - set(made_by) == {"llama-cpu-160MiB.profile.json.gz"}
    for name, command in made_by.items():
        assert main.main([*command[:-1], str(tmp_path / name), "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        about = shipped_files.ABOUT_PROFILES[name.removesuffix(shipped_files.PROFILES.suffix)]
        assert asdict(about).items() - printed.items() == {("what", about.what)}
        # Compressed bytes differ between machines, but decompressed bytes do not.
        packed = (FOLDER / name).read_bytes()
        assert gzip.decompress(packed) == gzip.decompress((tmp_path / name).read_bytes()), name
        assert len(packed) < 2**20


def test_the_same_request_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert main.main(["profile", "synth", "gpt2", "-o", str(tmp_path / f"{name}.json.gz")]) == 0
    assert (tmp_path / "one.json.gz").read_bytes() == (tmp_path / "two.json.gz").read_bytes()


def test_every_shipped_file_is_read_and_named_in_the_readme() -> None:
    readme = (FOLDER / "README.md").read_text()
    assert set(shipped_files.ABOUT_MACHINES) == set(shipped_files.MACHINES.names())
    for path in (FOLDER / "machines").iterdir():
        assert Machine.read(path).name == path.name.removesuffix(".machine.json")
        assert f"`{Machine.read(path).name}`" in readme
    measured = Profile.read(FOLDER / "llama-cpu-160MiB.profile.json.gz")
    about = shipped_files.ABOUT_PROFILES["llama-cpu-160MiB"]
    assert problem.smallest_budget(measured) == about.smallest_bytes
    assert (measured.compute_ns, int(problem.build_problem(measured).live.max())) == (
        about.compute_ns,
        about.peak_bytes,
    )
    assert "llama-cpu-160MiB" in readme


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-3.1-8"], "model 'llama-3.1-8' is unknown; did you mean llama-3.1-8b?"),
        (["gpt2", "--precision", "fp8"], "precision 'fp8' is unknown; there are bf16-mixed, bf16, fp32"),
        (["gpt2", "--batch", "0"], "--batch is 0; give 1 to"),
        (["gpt2", "--loss-chunks", "7"], "--loss-chunks 7 does not divide the 1024 tokens"),
        (["vit-b-16", "--sequence", "100"], "has a fixed sequence of 197"),
        (["gpt2", "--flop-rate", "fast"], "--flop-rate 'fast' is not a number"),
        (["gpt2", "--overhead", "1min"], "--overhead below 2 ms"),
        (["gpt2", "--memory-bandwidth", "9 parsecs"], "--memory-bandwidth, --overhead: '9 parsecs'"),
        (["gpt2", "--micro-batches", "4096", "--layers", "4096"], "give fewer micro-batches"),
    ],
)
def test_invalid_request_prints_one_error_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["profile", "synth", *arguments, "-o", str(tmp_path / "x.json")]) == 2
    error = capsys.readouterr().err
    assert message.lower() in error.lower() and error.count("\n") == 1
    assert not (tmp_path / "x.json").exists()


def test_frozen_weights_have_no_gradients_states_or_writes(toy: str) -> None:
    """Compare with the step that trains: only the products for gradients of weights are missing."""
    whole = profiles.synth(toy, profiles.ProfileRequest(batch=2, loss_chunks=3, rates=FREE))
    frozen = profiles.synth(toy, profiles.ProfileRequest(batch=2, loss_chunks=3, rates=FREE, frozen=True))
    frozen.validate()
    assert {tensor.kind for tensor in frozen.tensors} == {"weight", "activation", "input"}
    assert not [tensor.name for tensor in frozen.tensors if tensor.kind == "weight" and tensor.writes]
    assert products_ns(whole) - products_ns(frozen) == 2 * (3 * 144 + 40) * 12
    with pytest.raises(OptionError, match="--clip scales gradients of weights, and --frozen has none"):
        profiles.synth(toy, profiles.ProfileRequest(loss_chunks=3, clip=True, frozen=True))
