"""`hf-hyperconn`: results on stdout, the rest on stderr; nothing heavy is imported before a command needs it."""

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_hyperconn
from hf_hyperconn.errors import HyperConnError, VerificationError

from . import arguments
from .checkpoint.connection_options import OPTIONS
from .checkpoint.record import ClosedFolderError, folder_state, record_comparison
from .estimate import estimate_training
from .inspection import inspect_checkpoint
from .interrupts import hearing_interrupts
from .parser import Parser, completion
from .planning.plan import plan_conversion
from .push import carry_out_push, plan_push
from .terminal import open_streams, print_message, print_result, print_start
from .verify import MODES, fault_of_mode, verify_checkpoint

OK, FAILED, VERIFICATION_FAILED, INTERRUPTED = 0, 1, 3, 130
FIELD = re.compile(r"\bhc_\w+(?= must be | ')")  # in a message


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 done; 1 failed, with a message; 2 wrong usage (argparse); 3 verification failed; 130 interrupted.
    """
    open_streams()
    options = None
    try:
        parser, _ = _parsers()
        options = parser.parse_args(arguments)
        if options.quiet:
            os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        elif options.run is not _completion:
            print_start(options.command, getattr(options, "model", None) or options.folder or "")
        with hearing_interrupts():
            options.run(options)
        return OK
    except KeyboardInterrupt:
        is_resumable = options is not None and options.run in RESUMABLE and not options.dry_run
        print_message("interrupted; run the same command again to continue" if is_resumable else "interrupted")
        return INTERRUPTED
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, SystemExit | GeneratorExit) or options is None or options.verbose:
            raise
        hint = "" if isinstance(error, HyperConnError) else " (unexpected; run it again with -v for the traceback)"
        message = " ".join(_in_options(str(error), options).split())
        print_message(f"error: {message or type(error).__name__}{hint}")
        return VERIFICATION_FAILED if isinstance(error, VerificationError) else FAILED


def _in_options(message: str, options: argparse.Namespace) -> str:
    """Name options in the place of fields of connections, where the command was given some."""
    if not any(getattr(options, field, None) is not None for field in OPTIONS):
        return message
    return FIELD.sub(lambda field: OPTIONS.get(field[0], field[0]), message)


def _convert(options: argparse.Namespace) -> None:
    from .convert import carry_out

    if fault := fault_of_mode(options.verify, options.layers, (*MODES, "off")):
        raise HyperConnError(fault)
    plan = plan_conversion(
        options.model,
        options.out,
        fields=_fields(options),
        stack=options.stack,
        revision=options.revision,
        link=options.link,
        force=options.force,
    )
    if options.dry_run:
        _put(options, plan.as_dict(), plan.describe())
        return
    result = carry_out(plan, verify=options.verify, layers=options.layers, say=_speaker(options))
    if not options.json:
        _speaker(options)(f"next          {plan.loading}\n              equals its base until you train it")
    verification = result.verification and result.verification.as_dict()
    facts = {**plan.as_dict(), "renamed": result.renamed and str(result.renamed), "verification": verification}
    _put(options, facts, str(result.path), as_is=True)


def _fields(options: argparse.Namespace) -> Any:
    return {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}


def _estimate(options: argparse.Namespace) -> None:
    estimate = estimate_training(
        options.model,
        fields=_fields(options),
        stack=options.stack,
        revision=options.revision,
        tokens=options.tokens,
        gpus=options.gpus,
        dtype=options.dtype,
    )
    _put(options, estimate.as_dict(), "\n".join(estimate.lines()))


def _verify(options: argparse.Namespace) -> None:
    if options.against is None:
        of_a_base = {"--revision": options.revision, "--layers": options.layers, "--mode full": options.mode == "full"}
        if option := next((option for option, given in of_a_base.items() if given), None):
            raise HyperConnError(f"{option} requires --against MODEL. Give both, or neither.")
    folder = Path(options.folder)
    files = folder_state(folder)
    report = verify_checkpoint(
        options.folder, options.against, revision=options.revision, mode=options.mode, layers=options.layers
    )
    facts = {"folder": options.folder, "against": options.against, **report.as_dict()}
    _put(options, facts, "\n".join(report.lines()))
    if not report.passed:
        raise VerificationError(f"verification failed: {report.failure}.")
    try:
        if record_comparison(folder, report.as_dict(), files):
            _speaker(options)("recorded      the comparison with the base, which was missing")
    except ClosedFolderError as error:
        _speaker(options)(f"not recorded  {error}")


def _inspect(options: argparse.Namespace) -> None:
    inspection = inspect_checkpoint(options.model, options.revision)
    _put(options, inspection.as_dict(), "\n".join(inspection.lines()))


def _plot(options: argparse.Namespace) -> None:
    from .plot import draw

    files = draw(
        options.folder,
        options.kind,
        text=options.text,
        against=options.against,
        out=options.out,
        stack=options.stack,
    )
    paths = [str(path) for path in files]
    _put(options, {"files": paths}, "\n".join(paths), as_is=True)


def _card(options: argparse.Namespace) -> None:
    from .card import write_card

    card = write_card(
        options.folder, results=options.results, base_results=options.base_results, update=options.update
    )
    for section in card.kept:
        _speaker(options)(f"kept          the section {section!r} as it is")
    for warning in card.warnings:
        _speaker(options)(f"warning: {warning}")
    paths = [str(path) for path in card.files]
    _put(options, {**vars(card), "files": paths}, "\n".join(paths), as_is=True)


def _push(options: argparse.Namespace) -> None:
    plan = plan_push(
        options.folder,
        options.repo,
        private=options.private,
        create_pr=options.create_pr,
        revision=options.revision,
        include=options.include,
        accept_changes=options.accept_changes,
        say=_speaker(options),
    )
    if options.dry_run:
        _put(options, {"folder": options.folder, **plan.as_dict()}, plan.describe())
        return
    result = carry_out_push(plan, say=_speaker(options))
    _put(options, {"folder": options.folder, "repo": options.repo, **result.as_dict()}, result.url)


def _refresh(options: argparse.Namespace) -> None:
    from .refresh import refresh

    result = refresh(options.folder, dry_run=options.dry_run, accept_changes=options.accept_changes)
    _put(options, {"folder": options.folder, **result.as_dict()}, "\n".join(result.lines()))
    if result.forgets_verification and not result.is_current and not options.dry_run:
        _speaker(options)(f"next          hf-hyperconn verify {options.folder} --against BASE, as the code is new")


def _demo(options: argparse.Namespace) -> None:
    from .demo import run_demo

    run_demo(options.folder, steps=options.steps, say=_speaker(options))


def _completion(options: argparse.Namespace) -> None:
    _, commands = _parsers()
    text = completion(options.shell, commands)
    _put(options, {"completion": text}, text)


RESUMABLE = (_convert, _push)


def _speaker(options: argparse.Namespace) -> Callable[[str], None]:
    return (lambda line: None) if options.quiet else print_message


def _put(options: argparse.Namespace, facts: dict, text: str, *, as_is: bool = False) -> None:
    """Print a result, as facts in JSON or as text; `as_is` is for text with paths, see `print_result`."""
    shown = json.dumps(facts, indent=2, default=str) if options.json else text  # metadata may contain dates
    print_result(shown, as_is=as_is)


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the command line, and the parser of each command."""
    common = Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print the result as JSON")
    common.add_argument("-q", "--quiet", action="store_true", help="print the result and errors only")
    common.add_argument("-v", "--verbose", action="store_true", help="show the traceback of an error")

    parser = Parser(
        prog="hf-hyperconn", description="Hyper-Connections for Transformers checkpoints.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"hf-hyperconn {hf_hyperconn.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, (run, add_arguments, text) in COMMANDS.items():
        examples = arguments.EXAMPLES[name]
        command = subparsers.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example{'s' * (examples.count('hf-hyperconn') > 1)}:{examples}",
            parents=[common],
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        add_arguments(command)
    return parser, dict(subparsers.choices)


COMMANDS = {
    "convert": (_convert, arguments.add_convert, "convert a checkpoint, exactly, to one with n residual streams"),
    "estimate": (_estimate, arguments.add_estimate, "estimate memory and time of training, before converting"),
    "verify": (_verify, arguments.add_verify, "check a converted checkpoint, against its base if given"),
    "inspect": (
        _inspect,
        arguments.add_inspect,
        "show the facts of a converted checkpoint and the cost of its connections",
    ),
    "plot": (_plot, arguments.add_plot, "draw the connections of a converted checkpoint"),
    "card": (_card, arguments.add_card, "write or update the model card of a checkpoint"),
    "push": (_push, arguments.add_push, "push a checkpoint to the Hub, in one commit"),
    "refresh": (_refresh, arguments.add_refresh, "update the code of an older folder to this release"),
    "demo": (
        _demo,
        arguments.add_demo,
        "train a tiny Llama, convert it, verify it and train both further; offline, in minutes",
    ),
    "completion": (
        _completion,
        arguments.add_completion,
        "print a script that completes options in a shell",
    ),
}
