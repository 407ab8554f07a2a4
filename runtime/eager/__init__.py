"""User code: all code of the process that runs between compiled programs, or at the same time on other
threads. User code may read evicted tensors.

In: (1) reads and writes that the observer reports, (2) gradients that backwards return, (3) signals. Out:
tensors that are resident when an operator begins.

    user_code      UserCode: fetches the tensors that operators read, and keeps results of programs resident
    gradients      Gradients: allows the eviction of gradients, and fetches them when autograd adds to them
    signals        Signals: defers the handlers of signals until the engine is idle
    signal_pipe    SignalPipe: reports signals that arrive while Python cannot run a handler
    tensor_lists   functions of lists of tensors, which teraio calls for one element of the lists at a time

Invariant: user code never reads the freed memory of an evicted tensor. While an operator reads a storage, the
storage is not evicted.

Log lines:

    "Ctrl-C deferred to the end of this optimizer step"
    "... handler deferred: a program or an optimizer step still runs"
    "... is kept resident from now on: ..."
    "... unseen: all of them are resident between programs"
    "user code read NaN, because the bytes could not be fetched: ..."
"""
