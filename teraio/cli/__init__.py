"""The command line: `teraio COMMAND`, and `python -m teraio`.

In: words of a command line, files. Out: text, or one JSON object with --json; an exit code.

    main                      main: the parser, and errors as one line with the remedy
    commands                  the commands that plan offline, one file each
    report                    what a person sees of a step: page, terminal, trace
    demo, demo_model          the main job, small
    doctor, doctor_findings   what this machine can do, and the fix for what is wrong

Invariant: bad input ends with one line that says what is wrong, and exit code 2. No command leaves half a
file.
"""
