"""User code: what runs between two programs and beside them, and reads tensors that may be evicted.

In: reads and writes that the observer reports, gradients that backwards return, signals. Out: bytes that are
resident when an operator begins.

    user_code      UserCode: fetches what is read, keeps what is in use, takes results over
    gradients      Gradients: leave when a backward has made them, are resident when autograd adds to them
    signals        Signals: a handler waits for the end of the engine's work; signal_pipe hears signals
                   on threads where Python runs no handler
    tensor_lists   functions of lists of tensors, one element at a time

Invariant: user code never sees an evicted tensor's memory. No storage that an operator reads is evicted
before that operator ends.

Log lines: "Ctrl-C: after this step of the optimizer", "...: its handler waits for the end of what runs", "...
stays in memory from now on: ...", "... unseen: between programs all of them are in memory", "memory was read
whose bytes could not be fetched, and NaN was found: ...", "overrun: ... needs ... more than the memory".
"""
