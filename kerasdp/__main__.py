"""Runs the command `kerasdp` as `python -m kerasdp`."""

from kerasdp.cli.command import main

if __name__ == "__main__":
    main()
