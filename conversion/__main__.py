"""`hf-hyperconn`, also as `python -m hf_hyperconn.conversion`: Ctrl-C is waited for before anything is imported."""

import signal
import sys


def main() -> int:
    """Run the command line, see `cli.main`; Ctrl-C ends it in one line while its modules are imported, too."""
    try:
        try:
            from .cli import main

            return main()
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done but ending the process
    except KeyboardInterrupt:  # also one that came just before that
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
