"""The arguments of each command, and examples of its use."""

import argparse

from .checkpoint.connection_options import add_options
from .estimate import DTYPES
from .parser import SHELLS
from .planning.plan import LINKS
from .plot import PICTURES
from .verify import MODES

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


def add_convert(convert: argparse.ArgumentParser) -> None:
    convert.add_argument("model", metavar="MODEL", help="local folder or Hub id")
    convert.add_argument("out", metavar="OUT", nargs="?", help="folder to create (default: ./<name>-HCx<n>)")
    add_options(convert)
    _add_stack(convert)
    convert.add_argument("--revision", help="branch, tag or commit of MODEL; the commit is recorded")
    convert.add_argument(
        "--link",
        choices=LINKS,
        default="copy",
        help="copy, hard-link or symlink the base's weight files (default: copy)",
    )
    convert.add_argument(
        "--verify",
        choices=(*MODES, "off"),
        default="auto",
        help="structure: check files and tensors; full: also run both models; auto: run as many layers as fit in "
        "memory (default)",
    )
    convert.add_argument("--layers", type=_positive, metavar="K", help="verify with the first K layers only")
    convert.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
    convert.add_argument("--force", action="store_true", help="rename an existing OUT; its new name contains the time")


def _add_stack(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--stack",
        metavar="NAME",
        help="inner model that gets connections, such as encoder, decoder or vision_tower (default: encoder and "
        "decoder, or the language model)",
    )


def add_estimate(estimate: argparse.ArgumentParser) -> None:
    estimate.add_argument("model", metavar="MODEL", help="base or conversion: local folder or Hub id")
    add_options(estimate)
    _add_stack(estimate)
    estimate.add_argument("--revision", help="branch, tag or commit of MODEL")
    estimate.add_argument("--tokens", type=_positive, default=4096, help="tokens of a step on one GPU (default: 4096)")
    estimate.add_argument("--gpus", type=_positive, default=1, help="number of GPUs (default: 1)")
    estimate.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the weights (default: float32)")


def add_verify(verify: argparse.ArgumentParser) -> None:
    verify.add_argument("folder", metavar="OUT", help="folder of the converted checkpoint")
    verify.add_argument("--against", metavar="MODEL", help="base to compare with: local folder or Hub id")
    verify.add_argument("--revision", help="branch, tag or commit of MODEL")
    verify.add_argument("--mode", "--verify", choices=MODES, default="auto", help="as --verify of convert")
    verify.add_argument("--layers", type=_positive, metavar="K", help="run the first K layers only")


def add_inspect(inspect: argparse.ArgumentParser) -> None:
    inspect.add_argument("model", metavar="MODEL", help="local folder or Hub id; no weights are downloaded")
    inspect.add_argument("--revision", help="branch, tag or commit of MODEL")


def add_plot(plot: argparse.ArgumentParser) -> None:
    plot.add_argument("folder", metavar="DIR", help="folder of the checkpoint")
    plot.add_argument("--kind", choices=(*PICTURES, "all"), default="all", help="picture to draw (default: all)")
    plot.add_argument(
        "--text", metavar="FILE", help="text to run the model on; without it, only the static weights are shown"
    )
    plot.add_argument("--against", metavar="MODEL", help="base to draw beside it: local folder or Hub id")
    plot.add_argument("--stack", help="encoder or decoder of a model with both (default: decoder)")
    plot.add_argument("-o", "--out", help="file to write, or folder of all pictures (default: DIR/figures)")


def add_card(card: argparse.ArgumentParser) -> None:
    card.add_argument("folder", metavar="DIR", help="folder of the checkpoint")
    card.add_argument("--results", metavar="FILE", help="results_*.json of lm-eval, to show in the card")
    card.add_argument("--base-results", metavar="FILE", help="results_*.json of the base, to show beside them")
    card.add_argument(
        "--update", action="store_true", help="also update a README.md by you or Trainer, and keep its text"
    )


def add_push(push: argparse.ArgumentParser) -> None:
    push.add_argument("folder", metavar="DIR", help="folder of a conversion, or of a model saved after training")
    push.add_argument("repo", metavar="REPO", help="owner/name on the Hub; created if it doesn't exist")
    push.add_argument("--private", action="store_true", help="make the repo private")
    push.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    push.add_argument("--revision", metavar="BRANCH", help="branch to commit to, created if missing (default: main)")
    push.add_argument("--dry-run", action="store_true", help="list every file with its fate, and change nothing")
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


def add_refresh(refresh: argparse.ArgumentParser) -> None:
    refresh.add_argument("folder", metavar="DIR", help="folder of the checkpoint; its weights stay as they are")
    refresh.add_argument("--dry-run", action="store_true", help="print the changes, and write nothing")
    refresh.add_argument("--accept-changes", action="store_true", help="also replace code that somebody has edited")


def add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("folder", metavar="DIR", nargs="?", help="folder to keep the models in (default: none is kept)")
    demo.add_argument("--steps", type=_positive, default=300, metavar="K", help="training steps (default: 300)")


def add_completion(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", choices=SHELLS, help="the shell that reads the output")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {text})")
    return value
