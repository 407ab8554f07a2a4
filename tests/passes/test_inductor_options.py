"""Tests of settings of Inductor that a user changes.

The backend refuses an unknown setting, and the error suggests the nearest known name. It also refuses a
setting that does not work with slots, wherever the user made the setting. Both errors are raised before
anything is compiled. The backend never returns a program without slots.
"""

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
    """Compile a small graph through the backend, as Dynamo would."""
    return backend.backend(
        selftest.make_test_graph(), selftest.make_test_inputs("cpu"), options={**SMALL, **options}
    )


# ---- known and unknown settings


def test_settings_keep_inductors_own_names() -> None:
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


def test_setting_by_name_overrides_mode() -> None:
    asked = merge_checked_settings("max-autotune", {"triton.cudagraphs": False})
    assert asked == {"max_autotune": True, "triton.cudagraphs": False, "coordinate_descent_tuning": True}
    inductor_options.refuse_unfit_settings(asked, "max-autotune")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "reduce-overheat"}, "did you mean reduce-overhead?"),
        ({"inductor": {"max_autotun": True}}, "did you mean max_autotune?"),
        ({"inductor": {"triton.cudagraph": True}}, "did you mean triton.cudagraphs?"),
        ({"inductor": "epilog_fusion=true"}, "did you mean epilogue_fusion?"),
    ],
)
def test_unknown_name_error_suggests_nearest_name(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nothing_compiled(monkeypatch), pytest.raises(OptionError) as error:
        compiled(**options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_autotune", 1, "takes bool, such as its current value False"),
        ("max_autotune", "yes", "takes bool"),
        ("max_fusion_size", "64", "takes int, such as its current value 64"),
        ("max_fusion_size", True, "takes int"),
        ("cpp.simdlen", 1.5, "takes int | None"),
        ("max_autotune_gemm_search_space", "WIDE", "one of 'DEFAULT', 'EXHAUSTIVE'"),
        ("custom_should_partition_ops", "aten::mm", "string in torch._inductor.config.custom_should"),
        ("post_grad_custom_post_pass", "mine", "string in torch._inductor.config.post_grad"),
    ],
)
def test_value_of_wrong_type_is_refused(
    name: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nothing_compiled(monkeypatch), pytest.raises(OptionError) as error:
        compiled(inductor={name: value})
    assert f"'{name}' is " in str(error.value)
    assert message in str(error.value)


def test_integer_is_accepted_for_float_setting() -> None:
    assert merge_checked_settings(None, {"min_overlap_ratio": 2}) == {"min_overlap_ratio": 2}


@pytest.mark.parametrize("options", [{"mode": "lite"}, {"inductor": {"max_autotune": True}}])
def test_inductor_settings_are_refused_with_inner_eager(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="is for Inductor, but inner is 'eager'"):
        compiled(inner="eager", **options)


def test_mode_of_torch_compile_reaches_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.compile(torch.nn.Linear(4, 4), backend="teraio", mode="reduce-overhead")
    with nothing_compiled(monkeypatch), pytest.raises(Exception, match=r"by option 'mode' \('reduce-over"):
        model(torch.randn(2, 4))


# ---- settings that do not work with slots


@pytest.mark.parametrize("unfit", UNFIT, ids=lambda unfit: unfit.name)
def test_unfit_setting_is_refused_by_name(unfit: UnfitSetting, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_mode_is_refused_only_if_it_uses_cuda_graphs(mode: str) -> None:
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


def test_error_names_environment_variable_of_unfit_setting() -> None:
    variables = [unfit.variable for unfit in UNFIT if unfit.variable]
    assert len(variables) >= 6
    environment = {**os.environ, **dict.fromkeys(variables, "1")}
    ran = subprocess.run(
        [sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.stdout.split() == [word for variable in variables for word in (variable, "True")], ran.stderr


def test_compile_paths_without_slots_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_fx = sys.modules["torch._inductor.compile_fx"]
    others: list[tuple[Any, str, Any, str]] = [
        (compile_fx, "fx_compile_mode", SimpleNamespace(name="SUBPROCESS"), "TORCHINDUCTOR_FX_COMPILE_MODE"),
        (utils._unstable_customized_partition_wrapper, "wrapper", print, "partitions"),
    ]
    for owner, name, value, message in others:
        with nothing_compiled(monkeypatch), monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            with pytest.raises(UnsupportedError, match=message):
                compiled()
    with nothing_compiled(monkeypatch), V.set_aot_compilation(True):
        with pytest.raises(UnsupportedError, match="ahead-of-time"):
            compiled()
    with nothing_compiled(monkeypatch), torch._dynamo.config.patch(caching_precompile=True):
        with pytest.raises(UnsupportedError, match="TORCH_CACHING_PRECOMPILE"):
            compiled()


def test_wrapper_of_another_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign(wrapper.PythonWrapperCodegen):
        pass

    common.init_backend_registration()
    theirs = SimpleNamespace(wrapper_codegen=Foreign)
    with nothing_compiled(monkeypatch):
        monkeypatch.setitem(common.device_codegens, "cpu", theirs)
        with pytest.raises(UnsupportedError, match=r"another library .*Foreign"):
            compiled()


# ---- programs without slots


def trained(**options: Any) -> None:
    run = compiled(**options)
    (loss,) = run(*selftest.make_test_inputs("cpu"))
    loss.backward()


def test_program_without_slots_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def lost(_: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(inductor, "use_slotted_wrapper", lost)
    with pytest.raises(Exception, match=r"UnsupportedError.*without teraio's slots|without teraio's slots"):
        trained()


def test_compiler_that_never_calls_teraio_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "compile_fx", lambda gm, *_, **__: gm)
    with pytest.raises(UnsupportedError, match="without calling teraio"):
        trained()


def test_program_that_does_not_report_at_load_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teraio.runtime.engine.engine.collect_loaded_programs", lambda meets: nullcontext([]))
    with pytest.raises(Exception, match="did not report to teraio"):
        trained()


def keys(registry: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return teraio's parts of two cache keys. The first key is for a whole model, the second for a single
    graph."""
    whole: list[str] = []

    def compile_fx(gm: Any, inputs: Any, inner_compile: Any, config_patches: dict[str, Any]) -> None:
        whole.append(config_patches["post_grad_custom_post_pass"].uuid())

    with monkeypatch.context() as patched, suppress(UnsupportedError):
        patched.setattr(inductor, "compile_fx", compile_fx)
        inductor.compile_program(None, None, print, lambda: nullcontext([]), registry=registry)  # type: ignore[arg-type]
    compilation = inductor.Compilation("forward", 1, frozenset(), (), print, registry, True)
    with inductor.use_slotted_wrapper(compilation):
        key: Any = config.post_grad_custom_post_pass
        return whole[0], key.uuid()


def test_cache_key_depends_on_registry_module_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, before = keys(inductor.REGISTRY, monkeypatch), keys("teraio.runtime.engine", monkeypatch)
    assert now == keys(inductor.REGISTRY, monkeypatch)
    assert now[0] != before[0] and now[1] != before[1]
    assert all(key.startswith("teraio-slots-4 ") for key in now)
    assert callable(importlib.import_module(inductor.REGISTRY).program)


def test_setting_changed_before_backward_is_refused_at_backward() -> None:
    run = compiled()
    (loss,) = run(*selftest.make_test_inputs("cpu"))
    with config.patch(cpp_wrapper=True), pytest.raises(Exception, match="'cpp_wrapper' is on"):
        loss.backward()


class UnlistedLine(wrapper.WrapperLine):
    def codegen(self, code: Any) -> None:
        pass


@pytest.mark.parametrize("before", [[], [UnlistedLine()]])
def test_user_streams_are_refused_by_name(
    before: list[wrapper.WrapperLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that CUDA streams of user code are refused.

    Teraio would otherwise run a program as one kernel if it cannot read one of the program's lines. The
    streams must be refused even after such a line.
    """
    plainly = wrapper.PythonWrapperCodegen.run_wrapper_ir_passes

    def with_streams(self: Any, is_inference: bool) -> None:
        plainly(self, is_inference)
        self.lines += [*before, wrapper.EnterCudaStreamContextLine(stream_idx=1)]

    monkeypatch.setattr(wrapper.PythonWrapperCodegen, "run_wrapper_ir_passes", with_streams)
    with pytest.raises(Exception, match=r"kernels on CUDA streams of its own.*torch\.cuda\.stream"):
        trained()
