"""The callback for Hugging Face's Trainer. In: a Trainer's model and options. Out: a compiled model, and
figures in the Trainer's log.

    Trainer(model, arguments, callbacks=[TeraioCallback(memory="20GiB")], ...)

The callback compiles the model in place, so the keys of its state dict do not change. Code is compiled at
the first call of the model. A Trainer passes a log to its callbacks in their order, and the callbacks of
`report_to` precede the user's callbacks. So the callback moves itself to the front of this order. It then
adds its figures before any other callback reads the log.
"""

from __future__ import annotations

import logging
import sys
from types import FrameType
from typing import Any

import teraio
from teraio.errors import OptionError
from teraio.options import Settings

from .compiled_models import COMPILED, compile_and_note, reason_not_to_compile
from .metrics import brief_figures

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import CallbackHandler
except ImportError as error:
    raise ImportError(
        "teraio.integrations.transformers needs Hugging Face's Trainer, and its import failed "
        f"({error}): pip install transformers accelerate"
    ) from error

log = logging.getLogger("teraio")

FRAMES = 4  # at most so many frames are between a callback's method and the list of callbacks; usually none


class TeraioCallback(TrainerCallback):
    """A Trainer's callback that compiles the model with teraio, and logs how its steps run.

    The arguments are the options of `torch.compile(..., options=...)`. Options that are not given come from
    `teraio.init`, from environment variables, or are defaults.
    """

    def __init__(self, **options: Any) -> None:
        Settings.parse(options)  # a wrong option raises an error here, not at the first step
        self.options = options
        self.told: set[str] = set()  # log lines that were printed

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._take_part(args, model, sys._getframe(1))

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Compile a model that did not exist at `on_init_end`, because `model_init` makes it. Do the same
        for a callback that `trainer.add_callback` has added later."""
        self._take_part(args, model, sys._getframe(1))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the figures of the last step to the log of a training step. Logs of evaluations get none."""
        if not logs or "loss" not in logs:
            return
        figures = brief_figures(teraio.stats(), words=True)
        logs.update(figures)
        last = state.log_history[-1] if state.log_history else {}
        if last.get("step") == state.global_step and "loss" in last:
            last.update(figures)  # the Trainer has copied the log to its history before this call

    def _take_part(self, args: Any, model: Any, caller: FrameType | None) -> None:
        if args.torch_compile:
            raise OptionError(
                f"TrainingArguments compile the model with backend {args.torch_compile_backend!r}, and "
                f"TeraioCallback compiles it with teraio; only one of them can. Leave out torch_compile, "
                f"torch_compile_backend and torch_compile_mode"
            )
        self._move_to_front(caller)
        if model is None or COMPILED.get(model) == self.options:
            return
        reason = reason_not_to_compile(model)
        if reason is None:
            compile_and_note(model, self.options)
        elif self.options:
            self._warn_once(f"TeraioCallback compiles nothing, because {reason}; its options have no effect")

    def _move_to_front(self, frame: FrameType | None) -> None:
        """Move this callback to the front of the Trainer's list.

        The Trainer passes the list to no callback. So find it in the calling frame: the list's owner makes
        the call.
        """
        for _ in range(FRAMES):
            owner = frame.f_locals.get("self") if frame is not None else None
            if isinstance(owner, CallbackHandler) and any(each is self for each in owner.callbacks):
                owner.callbacks.remove(self)
                owner.callbacks.insert(0, self)
                return
            frame = frame.f_back if frame is not None else None
        self._warn_once(
            "figures may not reach the loggers of report_to, because the Trainer's list of callbacks was not "
            "found. Use report_to='none', and pass the loggers as callbacks after TeraioCallback"
        )

    def _warn_once(self, text: str) -> None:
        if text not in self.told:
            self.told.add(text)
            log.warning("teraio: %s", text)
