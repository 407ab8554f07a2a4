"""User code: all code of the process that runs between programs or concurrently with them. User code may read
evicted tensors.

In: (1) reads and writes that the observer reports, (2) gradients that backwards return, (3) signals. Out:
tensors that are resident when an operator begins.

    user_code      UserCode: fetches tensors that operators read, hands out results of programs
    gradients      Gradients: evictable once a backward has made them, resident when autograd adds to them
    signals        Signals: it defers the handlers of signals until the engine is idle
    signal_pipe    SignalPipe: it reports signals that arrive while Python cannot run a handler
    tensor_lists   functions of lists of tensors, which are called for one element at a time

Invariant: user code never sees an evicted tensor's memory. While an operator reads a storage, the storage is
not evicted.

Log lines:

    "Ctrl-C deferred to the end of this optimizer step"
    "... handler deferred: a program or an optimizer step still runs"
    "... is kept resident from now on: ..."
    "... unseen: all of them are resident between programs"
    "user code read NaN, because the bytes could not be fetched: ..."
"""
