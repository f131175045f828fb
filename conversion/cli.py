"""`hf-hyperconn`: results on stdout, the rest on stderr; nothing heavy is imported before a command needs it."""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_hyperconn
from hf_hyperconn.errors import HyperConnError, VerificationError

from .checkpoint.connection_options import OPTIONS, add_options
from .checkpoint.record import ClosedFolderError, files_now, record_comparison
from .estimate import DTYPES, estimate_training
from .inspection import inspect_checkpoint
from .interrupts import hearing_interrupts
from .parser import SHELLS, Parser, completion
from .planning.plan import LINKS, plan_conversion
from .plot import PICTURES
from .push import carry_out_push, plan_push
from .terminal import begin, open_streams, put, tell
from .verify import MODES, fault_of_mode, verify_checkpoint

OK, FAILED, VERIFICATION_FAILED, INTERRUPTED = 0, 1, 3, 130

EXAMPLES = {
    "convert": """
  hf-hyperconn convert meta-llama/Llama-3.2-1B -n 4
  hf-hyperconn convert ./llama ./llama-hc --connection shc -n 2 --link hard
  hf-hyperconn convert ./llama --start history
  hf-hyperconn convert ./llava --stack vision_tower
  hf-hyperconn convert ./llama --dry-run
""",
    "estimate": """
  hf-hyperconn estimate meta-llama/Llama-3.2-1B
  hf-hyperconn estimate meta-llama/Llama-3.1-8B -n 2 --gpus 8 --tokens 8192 --dtype bfloat16
""",
    "verify": """
  hf-hyperconn verify ./Llama-3.2-1B-HCx4 --against meta-llama/Llama-3.2-1B
  hf-hyperconn verify ./llama-hc --against ./llama --mode structure
""",
    "inspect": """
  hf-hyperconn inspect ./Llama-3.2-1B-HCx4
  hf-hyperconn inspect someone/Llama-3.2-1B-HCx4 --json
""",
    "plot": """
  hf-hyperconn plot ./Llama-3.2-1B-HCx4 --text article.txt
  hf-hyperconn plot ./Llama-3.2-1B-HCx4 --text article.txt -o sheet.pdf
  hf-hyperconn plot ./llama-hc --kind similarity --text article.txt --against ./llama -o similarity.pdf
  hf-hyperconn plot ./llama-hc --kind connections -o static-weights.png
""",
    "card": """
  hf-hyperconn card ./Llama-3.2-1B-HCx4
  hf-hyperconn card ./Llama-3.2-1B-HCx4 --results results/results_2026-11-21.json
  hf-hyperconn card ./runs/first --update
""",
    "push": """
  hf-hyperconn push ./Llama-3.2-1B-HCx4 me/Llama-3.2-1B-HCx4 --dry-run
  hf-hyperconn push ./Llama-3.2-1B-HCx4 me/Llama-3.2-1B-HCx4 --include 'notes/*.md'
  hf-hyperconn push ./llama-hc me/llama-hc --private --revision trained
  hf-hyperconn push ./llama-hc team/llama-hc --create-pr --json
""",
    "refresh": """
  hf-hyperconn refresh ./Llama-3.2-1B-HCx4 --dry-run
  hf-hyperconn refresh ./Llama-3.2-1B-HCx4
""",
    "demo": """
  hf-hyperconn demo --steps 100
""",
    "completion": """
  source <(hf-hyperconn completion bash)
""",
}


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
            begin(options.command, getattr(options, "model", None) or options.folder or "")
        with hearing_interrupts():
            options.run(options)
        return OK
    except KeyboardInterrupt:
        is_resumable = options is not None and options.run in RESUMABLE and not options.dry_run
        tell("interrupted; run the same command again to continue" if is_resumable else "interrupted")
        return INTERRUPTED
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, SystemExit | GeneratorExit) or options is None or options.verbose:
            raise
        hint = "" if isinstance(error, HyperConnError) else " (unexpected; run it again with -v for the traceback)"
        tell(f"error: {' '.join(str(error).split()) or type(error).__name__}{hint}")
        return VERIFICATION_FAILED if isinstance(error, VerificationError) else FAILED


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
    found = estimate_training(
        options.model,
        fields=_fields(options),
        stack=options.stack,
        revision=options.revision,
        tokens=options.tokens,
        gpus=options.gpus,
        dtype=options.dtype,
    )
    _put(options, found.as_dict(), "\n".join(found.lines()))


def _verify(options: argparse.Namespace) -> None:
    if options.against is None:
        of_a_base = {"--revision": options.revision, "--layers": options.layers, "--mode full": options.mode == "full"}
        if option := next((option for option, given in of_a_base.items() if given), None):
            raise HyperConnError(f"{option} requires --against MODEL. Give both, or neither.")
    folder = Path(options.folder)
    files = files_now(folder)
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
    return (lambda line: None) if options.quiet else tell


def _put(options: argparse.Namespace, facts: dict, text: str, *, as_is: bool = False) -> None:
    """Print a result, as facts in JSON or as text; `as_is` is for text with paths, see `put`."""
    put(json.dumps(facts, indent=2, default=str) if options.json else text, as_is=as_is)  # metadata may hold dates


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
        command = subparsers.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example{'s' * (EXAMPLES[name].count('hf-hyperconn') > 1)}:{EXAMPLES[name]}",
            parents=[common],
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        add_arguments(command)
    return parser, dict(subparsers.choices)


def _add_convert(convert: argparse.ArgumentParser) -> None:
    convert.add_argument("model", metavar="MODEL", help="local folder or Hub id")
    convert.add_argument("out", metavar="OUT", nargs="?", help="folder to create (default: ./<name>-HCx<n>)")
    add_options(convert)
    _add_stack(convert)
    convert.add_argument("--revision", help="branch, tag or commit of MODEL; the commit is recorded")
    convert.add_argument(
        "--link",
        choices=LINKS,
        default="copy",
        help="how the base's weight files get into OUT (default: copy)",
    )
    convert.add_argument(
        "--verify",
        choices=(*MODES, "off"),
        default="auto",
        help="structure: check files and tensors; full: also run both models; auto: run the layers that fit in memory "
        "(default)",
    )
    convert.add_argument("--layers", type=_positive, metavar="K", help="verify with the first K layers only")
    convert.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    convert.add_argument("--force", action="store_true", help="rename an OUT that exists, to a name with the time")


def _add_stack(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--stack",
        metavar="NAME",
        help="the model in MODEL that gets them: encoder or decoder alone, or another than the language model, as "
        "vision_tower (default: encoder and decoder, or the language model)",
    )


def _add_estimate(estimate: argparse.ArgumentParser) -> None:
    estimate.add_argument("model", metavar="MODEL", help="base or conversion: local folder or Hub id")
    add_options(estimate)
    _add_stack(estimate)
    estimate.add_argument("--revision", help="branch, tag or commit of MODEL")
    estimate.add_argument("--tokens", type=_positive, default=4096, help="of a step on a GPU (default: 4096)")
    estimate.add_argument("--gpus", type=_positive, default=1, help="GPUs that train it (default: 1)")
    estimate.add_argument("--dtype", choices=DTYPES, default="float32", help="of its weights (default: float32)")


def _add_verify(verify: argparse.ArgumentParser) -> None:
    verify.add_argument("folder", metavar="OUT", help="folder of the converted checkpoint")
    verify.add_argument("--against", metavar="MODEL", help="its base: local folder or Hub id")
    verify.add_argument("--revision", help="branch, tag or commit of MODEL")
    verify.add_argument("--mode", "--verify", choices=MODES, default="auto", help="as in convert")
    verify.add_argument("--layers", type=_positive, metavar="K", help="run the first K layers only")


def _add_inspect(inspect: argparse.ArgumentParser) -> None:
    inspect.add_argument("model", metavar="MODEL", help="local folder or Hub id; no weights are downloaded")
    inspect.add_argument("--revision", help="branch, tag or commit of MODEL")


def _add_plot(plot: argparse.ArgumentParser) -> None:
    plot.add_argument("folder", metavar="DIR", help="folder of the checkpoint")
    plot.add_argument("--kind", choices=(*PICTURES, "all"), default="all", help="which picture (default: all)")
    plot.add_argument(
        "--text", metavar="FILE", help="text to run the model on; without it, only the static weights are shown"
    )
    plot.add_argument("--against", metavar="MODEL", help="its base, for comparison: local folder or Hub id")
    plot.add_argument("--stack", help="encoder or decoder, of a model with both (default: decoder)")
    plot.add_argument("-o", "--out", help="file to write, or folder for all pictures (default: DIR/figures)")


def _add_card(card: argparse.ArgumentParser) -> None:
    card.add_argument("folder", metavar="DIR", help="folder of the checkpoint")
    card.add_argument("--results", metavar="FILE", help="results_*.json of lm-eval, to show in the card")
    card.add_argument("--base-results", metavar="FILE", help="the same for the base, for comparison")
    card.add_argument(
        "--update", action="store_true", help="also update a README.md that you or Trainer wrote, and keep its text"
    )


def _add_push(push: argparse.ArgumentParser) -> None:
    push.add_argument("folder", metavar="DIR", help="folder of a conversion, or of a model saved after training")
    push.add_argument("repo", metavar="REPO", help="owner/name on the Hub; created if it doesn't exist")
    push.add_argument("--private", action="store_true", help="make the repo private")
    push.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    push.add_argument("--revision", metavar="BRANCH", help="branch to commit to, created if missing (default: main)")
    push.add_argument("--dry-run", action="store_true", help="list the fate of every file, and change nothing")
    push.add_argument(
        "--include",
        metavar="PATTERN",
        action="append",
        default=[],
        help="also push files that don't belong to a model, by a pattern relative to DIR; may be repeated",
    )
    push.add_argument(
        "--accept-changes",
        action="store_true",
        help="push even if code, config or other files have changed since they were written",
    )


def _add_refresh(refresh: argparse.ArgumentParser) -> None:
    refresh.add_argument("folder", metavar="DIR", help="folder of the checkpoint; its weights stay as they are")
    refresh.add_argument("--dry-run", action="store_true", help="print the changes, and make none")
    refresh.add_argument(
        "--accept-changes", action="store_true", help="also replace code that has changed since it was written"
    )


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("folder", metavar="DIR", nargs="?", help="where to keep the models (default: they are not kept)")
    demo.add_argument("--steps", type=_positive, default=300, metavar="K", help="training steps (default: 300)")


def _add_completion(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", choices=SHELLS, help="the shell that reads the output")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


COMMANDS = {
    "convert": (_convert, _add_convert, "convert a checkpoint, exactly, to one with n residual streams"),
    "estimate": (_estimate, _add_estimate, "estimate memory and time of training, before converting"),
    "verify": (_verify, _add_verify, "check a converted checkpoint, against its base if given"),
    "inspect": (_inspect, _add_inspect, "show the facts of a converted checkpoint and the cost of its connections"),
    "plot": (_plot, _add_plot, "draw the connections of a converted checkpoint"),
    "card": (_card, _add_card, "write or update the model card of a checkpoint"),
    "push": (_push, _add_push, "push a checkpoint to the Hub, in one commit"),
    "refresh": (_refresh, _add_refresh, "update the code of an older folder to this release"),
    "demo": (
        _demo,
        _add_demo,
        "train a tiny Llama, convert it, verify it and train both further; offline, in minutes",
    ),
    "completion": (_completion, _add_completion, "print a script by which a shell completes options and choices"),
}
