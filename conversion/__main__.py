"""The entry point `hf-hyperconn`, also `python -m hf_hyperconn.conversion`; it expects Ctrl-C before any import."""

import signal
import sys


def main() -> int:
    """Run the command line, see `cli.main`; Ctrl-C ends even its imports with one line."""
    try:
        try:
            from .interrupts import hearing_interrupts

            with hearing_interrupts():
                from .cli import main

            return main()
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done but ending the process
    except KeyboardInterrupt:  # also one that came just before that
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
