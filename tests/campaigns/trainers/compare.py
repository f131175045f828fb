"""Running a case on the base and on its conversion, and what of the two must agree."""

import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from hf_hyperconn import hc_parameters
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.demo import byte_tokenizer
from tests.campaigns.engines.cases import BASES
from tests.pages import REPOSITORY
from tests.tolerances import ROUNDED_AS_THE_BASE

from .cases import Case
from .tools import TOOLS

SAVED = "Llama-3.2-1B-HCx4-trained"
IMPORTED = ("transformers.trainer", "transformers.models.llama.modeling_llama", "peft", "datasets")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Runs:
    """A base, its conversion, and the jobs that are run on them."""

    def __init__(self, place: Path):
        """Make both folders in a place, where jobs are run, too."""
        self.place, self.base, self.conversion = place, place / "base", place / "conversion"
        self.servers: dict[tuple[str, bool], subprocess.Popen] = {}
        torch.manual_seed(0)
        LlamaForCausalLM(BASES["Llama"]).save_pretrained(self.base)
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens({"pad_token": "<pad>", "eos_token": "<end>"})
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(self.base)
        convert_checkpoint(str(self.base), self.conversion, verify="off")
        self.start = dict(hc_parameters(transformers.AutoModelForCausalLM.from_pretrained(self.conversion)))

    def compare(self, case: Case) -> dict:
        """Return a row of the table: what was expected, what was found, and whether it was that."""
        row = {"does": case.does, "verdict": case.verdict, "versions": {}, "ok": False}
        if case.because:
            found = self.run(case, self.conversion, case.options).get("error", "it trains")
            return {**row, "ok": case.message in found, "found": found}
        base = self.run(case, self.base, case.options)
        if "error" in base:
            return {**row, "found": f"the base fails: {base['error']}"}
        wrong = self.wrong(self.run(case, self.conversion, case.options), base)
        if case.needs and not wrong:
            without = self.wrong(self.run(case, self.conversion, case.without), base)
            if case.message not in without:
                wrong = f"without what it needs: {without or 'as the base'}"
        found = {"versions": base["versions"], "first_loss": base["losses"][0], "found": wrong or case.verdict}
        return {**row, **found, "ok": not wrong}

    def run(self, case: Case, folder: Path, options: dict) -> dict:
        """Return the answer of a tool's script; or `error`, what it printed last."""
        place = self.place / "job"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        (place / "Llama-3.2-1B-HCx4").symlink_to(folder)  # as on the page
        job = {"options": {**options, "has_connections": folder == self.conversion}}
        (place / "job.json").write_text(json.dumps(job), encoding="utf-8")
        server = self.server(case)
        server.stdin.write(json.dumps({"place": str(place), "ranks": case.ranks}) + "\n")
        server.stdin.flush()
        if server.stdout.readline() != "0\n":
            printed = "".join(log.read_text(encoding="utf-8", errors="replace")[-5000:] for log in place.glob("log*"))
            return {"error": printed or "the tool's script does not start"}
        answer = json.loads((place / "answer.json").read_text(encoding="utf-8"))
        try:
            return {**answer, "distance": self.distance(folder, answer) if answer["is_trained"] else None}
        except OSError as error:
            return {"error": f"what was saved does not load: {error}"}

    def server(self, case: Case) -> subprocess.Popen:
        """Return the process that runs the jobs of a case's tool, started if it isn't there."""
        name, tool = (case.tool, case.has_package), TOOLS[case.tool]
        if name not in self.servers:
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            environment |= {"HF_MODULES_CACHE": str(self.place / "modules"), "HF_HUB_OFFLINE": "1", **tool.variables}
            environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            programs = tool.python().parent
            environment["PATH"] = os.pathsep.join((str(programs), os.environ["PATH"]))
            extensions = programs.parent / "extensions"  # of DeepSpeed, a minute to compile
            for lock in extensions.glob("*/lock"):  # of a run that was interrupted
                lock.unlink()
            environment["TORCH_EXTENSIONS_DIR"] = str(extensions)
            if case.has_package:
                environment["PYTHONPATH"] = str(REPOSITORY)
            script = Path(__file__).with_name(tool.script)
            command = [tool.python(), script.with_name("warm.py"), script, *IMPORTED, *tool.modules]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.servers[name] = subprocess.Popen(command, env=environment, **pipes)
        return self.servers[name]

    def close(self) -> None:
        """End the processes that run jobs."""
        for server in self.servers.values():
            server.stdin.close()
            server.wait()

    def wrong(self, answer: dict, base: dict) -> str:
        """Return what is wrong with a conversion that was trained, in words; nothing, when all is well."""
        if "error" in answer:
            return f"the conversion fails: {answer['error']}"
        is_trained = answer["is_trained"]
        if is_trained and (wrong := self.wrong_connections()):
            return wrong
        losses = answer["losses"]
        if not all(map(math.isfinite, losses)) or losses[0] != base["losses"][0]:
            return f"first losses {losses[0]} and, of the base, {base['losses'][0]}"
        if answer.get("compared") != base.get("compared"):
            return f"at first {answer['compared']} and, of the base, {base['compared']}"
        if answer.get("resumed", losses[2:]) != losses[2:]:
            return f"losses {losses[2:]}, after resuming {answer['resumed']}"
        if not answer.get("loaded", True):
            return "the tool does not load what it saved"
        if is_trained and answer["distance"] > ROUNDED_AS_THE_BASE * base["distance"]:
            return f"loaded again, outputs are {answer['distance']:.2g} away; of the base {base['distance']:.2g}"
        return ""

    def wrong_connections(self) -> str:
        """Return what is wrong with the connections that were saved."""
        saved = self.place / "job" / SAVED
        tensors = {name: tensor for file in saved.glob("*.safetensors") for name, tensor in load_file(file).items()}
        unmoved = []
        for name, start in self.start.items():
            short = name.removeprefix("model.")
            found = [tensor for stored, tensor in tensors.items() if stored.endswith(short)]
            if len(found) != 1:
                return f"connections are not saved: {name}"
            if found[0].dtype is not torch.float32:
                return f"{name} is saved in {str(found[0].dtype).removeprefix('torch.')}"
            if torch.equal(found[0], start):
                unmoved.append(name)
        return f"connections did not move: {', '.join(unmoved)}" if unmoved else ""

    @torch.no_grad()
    def distance(self, folder: Path, answer: dict) -> float:
        """Return how far the outputs of what was saved, loaded again, are from those in memory."""
        job, load = self.place / "job", getattr(transformers, answer["auto"]).from_pretrained
        if (job / SAVED / "adapter_config.json").exists():
            model = PeftModel.from_pretrained(load(folder, **answer.get("head", {})), job / SAVED)
        else:
            model = load(job / SAVED)
        outputs = torch.load(job / "outputs.pt")
        return (model.eval()(torch.arange(3, 67)[None])[0] - outputs).abs().max().item()
