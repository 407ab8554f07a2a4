"""The launch of an unchanged script by `teraio run`. teraio compiles the models that the script trains.

In: a command line. Out: the script's own process, in which a few functions of torch are wrapped.

    program          the program to start, and its environment
    bootstrap/       sitecustomize.py: Python runs this file at its start, in every child process, too
    torch_import     wraps the functions of torch as soon as the script has imported torch
    compile_calls    the script's own calls of torch.compile get this backend
    trained_models   a model that an optimizer trains is compiled at its first call with gradients
    moved_models     a model that is larger than the budget is evicted as it moves to a GPU
    run_lines        the log lines of such a run

Invariant: nothing here imports torch, or a module that imports torch, before the script does. The process is
the script's own: `teraio run` replaces itself with the script's interpreter. So `sys.argv`, `__main__`,
signals, the exit code and the standard streams are as without teraio.

Log lines: "no budget was kept, because nothing was compiled", "numbers: Inductor's differ from eager
PyTorch's".
"""
