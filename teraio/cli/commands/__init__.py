"""The commands of `teraio` that plan offline, one file each: `add_arguments(parser)` and `main(arguments)`.

They print for people, or one JSON object with --json, and raise what main.py turns into one line.
"""
