"""The command line: `teraio COMMAND`, and `python -m teraio`.

In: words of a command line, files. Out: text, or one JSON object with --json; an exit code.

    main                      main, which builds the parser, runs a command, and prints an error as one line
    commands                  the commands that plan offline, one file each
    report                    the report of a step, as a page, as text and as a trace
    run                       starts an unchanged script, by teraio.launch
    demo, demo_model          a small training, first without a budget and then with one
    doctor, doctor_findings   checks of this machine, with a fix for each problem

Invariant: bad input ends with exit code 2 and one line that names the fault. No command writes half a file.
"""
