"""Promises about Inductor's own settings: what it does not know is refused with what was meant, what slots
cannot live with is refused by name wherever it was set, and nothing is compiled before. No program comes out
without its slots."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config, utils
from torch._inductor.codegen import common, wrapper
from torch._inductor.virtualized import V

import teraio
from teraio import backend
from teraio.errors import OptionError, UnsupportedError
from teraio.passes import selftest
from teraio.passes.inductor import codegen as inductor
from teraio.passes.inductor import options as inductor_options
from teraio.passes.inductor.options import UNFIT, UnfitSetting, merge_checked_settings
from teraio.session import session

SMALL = {"memory": "1GiB"}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with config.patch(force_disable_caches=True):
        yield
    teraio.reset()
    torch._dynamo.reset()


@contextmanager
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def compiled(*_: Any, **__: Any) -> None:
        pytest.fail("Inductor was called")

    with monkeypatch.context() as patched:
        patched.setattr(inductor, "compile_fx", compiled)
        yield
    assert session.SESSION is None, "a store was opened, memory was measured"


def compiled(**options: Any) -> Any:
    """A small graph handed to the backend, as Dynamo does it."""
    return backend.backend(
        selftest.make_test_graph(), selftest.make_test_inputs("cpu"), options={**SMALL, **options}
    )


# ---- what Inductor knows


def test_what_is_asked_for_reaches_inductor_by_its_own_names() -> None:
    assert merge_checked_settings(None, {}) == {}
    assert merge_checked_settings("default", {}) == {}
    assert merge_checked_settings("max-autotune-no-cudagraphs", {}) == {
        "max_autotune": True,
        "coordinate_descent_tuning": True,
    }
    assert merge_checked_settings(None, {"max-autotune": False, "cpp.simdlen": 8}) == {
        "max_autotune": False,
        "cpp.simdlen": 8,
    }


def test_a_setting_by_name_wins_over_the_mode() -> None:
    asked = merge_checked_settings("max-autotune", {"triton.cudagraphs": False})
    assert asked == {"max_autotune": True, "triton.cudagraphs": False, "coordinate_descent_tuning": True}
    inductor_options.refuse_unfit_settings(asked, "max-autotune")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mode": "reduce-overheat"}, "did you mean reduce-overhead?"),
        ({"inductor": {"max_autotun": True}}, "did you mean max_autotune?"),
        ({"inductor": {"triton.cudagraph": True}}, "did you mean triton.cudagraphs?"),
        ({"inductor": "epilog_fusion=true"}, "did you mean epilogue_fusion?"),
    ],
)
def test_an_unknown_name_fails_with_the_nearest_one(
    options: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nothing_compiled(monkeypatch), pytest.raises(OptionError) as error:
        compiled(**options)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("max_autotune", 1, "takes bool, such as its False"),
        ("max_autotune", "yes", "takes bool"),
        ("max_fusion_size", "64", "takes int, such as its 64"),
        ("max_fusion_size", True, "takes int"),
        ("cpp.simdlen", 1.5, "takes int | None"),
        ("max_autotune_gemm_search_space", "WIDE", "one of 'DEFAULT', 'EXHAUSTIVE'"),
        ("custom_should_partition_ops", "aten::mm", "is set in torch._inductor.config.custom_should"),
        ("post_grad_custom_post_pass", "mine", "is set in torch._inductor.config.post_grad"),
    ],
)
def test_a_value_of_the_wrong_type_fails(
    name: str, value: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nothing_compiled(monkeypatch), pytest.raises(OptionError) as error:
        compiled(inductor={name: value})
    assert f"'{name}' is " in str(error.value)
    assert told in str(error.value)


def test_a_whole_number_is_a_number() -> None:
    assert merge_checked_settings(None, {"min_overlap_ratio": 2}) == {"min_overlap_ratio": 2}


@pytest.mark.parametrize("options", [{"mode": "lite"}, {"inductor": {"max_autotune": True}}])
def test_eager_takes_no_settings_of_inductor(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="is for Inductor, but inner is 'eager'"):
        compiled(inner="eager", **options)


def test_torch_compile_itself_hands_over_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.compile(torch.nn.Linear(4, 4), backend="teraio", mode="reduce-overhead")
    with nothing_compiled(monkeypatch), pytest.raises(Exception, match=r"by option 'mode' \('reduce-over"):
        model(torch.randn(2, 4))


# ---- what slots cannot live with


@pytest.mark.parametrize("unfit", UNFIT, ids=lambda unfit: unfit.name)
def test_what_slots_cannot_live_with_is_refused_by_name(
    unfit: UnfitSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nothing_compiled(monkeypatch):
        with pytest.raises(UnsupportedError) as asked:
            compiled(inductor={unfit.name: True})
        with config.patch({unfit.name: True}), pytest.raises(UnsupportedError) as found:
            compiled()
    for error, where in (asked, "by option 'inductor'"), (found, f"by torch._inductor.config.{unfit.name}"):
        assert f"'{unfit.name}' is on, {where}," in str(error.value)
        assert unfit.reason in str(error.value)
        assert "Turn it off" in str(error.value)


@pytest.mark.parametrize("mode", torch._inductor.list_mode_options())
def test_a_mode_with_cuda_graphs_is_refused_and_the_others_are_not(mode: str) -> None:
    asked = merge_checked_settings(mode, {})
    if asked.get("triton.cudagraphs"):
        with pytest.raises(UnsupportedError, match=f"by option 'mode' .'{mode}'.*max-autotune-no-cudagraphs"):
            inductor_options.refuse_unfit_settings(asked, mode)
    else:
        inductor_options.refuse_unfit_settings(asked, mode)


LOOK = """
from torch._inductor import config
from teraio.errors import UnsupportedError
from teraio.passes.inductor.options import UNFIT, refuse_unfit_settings
for one in UNFIT:
    if one.variable:
        with config.patch({other.name: False for other in UNFIT if other is not one}):
            try:
                refuse_unfit_settings({})
            except UnsupportedError as error:
                print(one.variable, f"by {one.variable} in the environment" in str(error))
"""


def test_what_the_environment_turns_on_is_found() -> None:
    variables = [unfit.variable for unfit in UNFIT if unfit.variable]
    assert len(variables) >= 6
    environment = {**os.environ, **dict.fromkeys(variables, "1")}
    ran = subprocess.run(
        [sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.stdout.split() == [word for variable in variables for word in (variable, "True")], ran.stderr


def test_other_ways_around_the_slots_are_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_fx = sys.modules["torch._inductor.compile_fx"]
    others: list[tuple[Any, str, Any, str]] = [
        (compile_fx, "fx_compile_mode", SimpleNamespace(name="SUBPROCESS"), "TORCHINDUCTOR_FX_COMPILE_MODE"),
        (utils._unstable_customized_partition_wrapper, "wrapper", print, "partitions"),
    ]
    for owner, name, value, told in others:
        with nothing_compiled(monkeypatch), monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            with pytest.raises(UnsupportedError, match=told):
                compiled()
    with nothing_compiled(monkeypatch), V.set_aot_compilation(True):
        with pytest.raises(UnsupportedError, match="ahead-of-time"):
            compiled()
    with nothing_compiled(monkeypatch), torch._dynamo.config.patch(caching_precompile=True):
        with pytest.raises(UnsupportedError, match="TORCH_CACHING_PRECOMPILE"):
            compiled()


def test_a_wrapper_of_another_library_is_not_silently_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign(wrapper.PythonWrapperCodegen):
        pass

    common.init_backend_registration()
    theirs = SimpleNamespace(wrapper_codegen=Foreign)
    with nothing_compiled(monkeypatch):
        monkeypatch.setitem(common.device_codegens, "cpu", theirs)
        with pytest.raises(UnsupportedError, match=r"another library .*Foreign"):
            compiled()


# ---- silent loss


def trained(**options: Any) -> None:
    run = compiled(**options)
    (loss,) = run(*selftest.make_test_inputs("cpu"))
    loss.backward()


def test_a_program_that_comes_back_without_slots_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def lost(_: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(inductor, "use_slotted_wrapper", lost)
    with pytest.raises(Exception, match=r"UnsupportedError.*without teraio's slots|without teraio's slots"):
        trained()


def test_a_compiler_that_asks_us_for_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "compile_fx", lambda gm, *_, **__: gm)
    with pytest.raises(UnsupportedError, match="without asking teraio"):
        trained()


def test_a_program_that_does_not_report_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teraio.runtime.engine.engine.collect_loaded_programs", lambda meets: nullcontext([]))
    with pytest.raises(Exception, match="did not report to teraio"):
        trained()


def keys(registry: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return what of a graph's key and of a whole model's is teraio's, if programs call this module."""
    whole: list[str] = []

    def compile_fx(gm: Any, inputs: Any, inner_compile: Any, config_patches: dict[str, Any]) -> None:
        whole.append(config_patches["post_grad_custom_post_pass"].uuid())

    with monkeypatch.context() as patched, suppress(UnsupportedError):
        patched.setattr(inductor, "compile_fx", compile_fx)
        inductor.compile_program(None, None, print, lambda: nullcontext([]), registry=registry)  # type: ignore[arg-type]
    with inductor.use_slotted_wrapper(inductor.Compilation("forward", 1, frozenset(), print, registry, True)):
        key: Any = config.post_grad_custom_post_pass
        return whole[0], key.uuid()


def test_a_cached_program_that_calls_a_module_by_its_old_name_is_compiled_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, before = keys(inductor.REGISTRY, monkeypatch), keys("teraio.runtime.engine", monkeypatch)
    assert now == keys(inductor.REGISTRY, monkeypatch)
    assert now[0] != before[0] and now[1] != before[1]
    assert all(key.startswith("teraio-slots-4 ") for key in now)
    assert callable(importlib.import_module(inductor.REGISTRY).program)


def test_a_setting_that_changes_before_the_backward_is_found_there() -> None:
    run = compiled()
    (loss,) = run(*selftest.make_test_inputs("cpu"))
    with config.patch(cpp_wrapper=True), pytest.raises(Exception, match="'cpp_wrapper' is on"):
        loss.backward()


class UnheardLine(wrapper.WrapperLine):
    def codegen(self, code: Any) -> None:
        pass


@pytest.mark.parametrize("before", [[], [UnheardLine()]])
def test_streams_of_the_users_are_refused_by_name(
    before: list[wrapper.WrapperLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind a line that cannot be read, where the program would run whole."""
    plainly = wrapper.PythonWrapperCodegen.run_wrapper_ir_passes

    def with_streams(self: Any, is_inference: bool) -> None:
        plainly(self, is_inference)
        self.lines += [*before, wrapper.EnterCudaStreamContextLine(stream_idx=1)]

    monkeypatch.setattr(wrapper.PythonWrapperCodegen, "run_wrapper_ir_passes", with_streams)
    with pytest.raises(Exception, match=r"kernels on streams of its own.*torch\.cuda\.stream"):
        trained()
