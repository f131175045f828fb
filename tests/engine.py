"""Run as a script, where hf_hyperconn can't be imported: models as vLLM's and SGLang's Transformers backends run them.

Both engines need a GPU, so this repeats what they do with a model before and while they call it: weights by their
names on disk, all in one dtype; norms and experts of the engine's own; attention by an instance for each layer.

Reads JSON from stdin: `cases`, each a folder and a dtype, the token `ids` of one sequence, and the file for the
`result`: for each case what the engine's call returns, `[sequence, hidden]`, and how often experts were called.
"""

import json
import re
import sys
from pathlib import Path

sys.modules["hf_hyperconn"] = None

import torch  # noqa: E402
from accelerate import init_empty_weights  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from transformers import AutoConfig, AutoModel  # noqa: E402
from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: E402
from transformers.core_model_loading import WeightRenaming  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.utils import logging  # noqa: E402

NAME = "engine"


class EngineAttention:
    """Causal attention of one layer, on `[tokens, heads * head size]` as an engine's kernels take it."""

    def __init__(self, config):
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def __call__(self, query, key, value, scaling):
        query = query.view(1, -1, self.heads, self.head_dim).transpose(1, 2)
        key, value = (x.view(1, -1, self.kv_heads, self.head_dim).transpose(1, 2) for x in (key, value))
        result = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return result.transpose(1, 2).contiguous()


def attend(module, query, key, value, attention_mask, scaling=None, attention_instances=None, **kwargs):
    """What is registered as attention implementation: it needs its instance and no mask."""
    assert attention_mask is None
    flat = (x.transpose(1, 2).reshape(x.shape[-2], -1) for x in (query, key, value))
    return attention_instances[module.layer_idx](*flat, scaling), None


class EngineNorm(nn.Module):
    """An RMSNorm of the engine's own class, with the weight and the epsilon of the one it replaces."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x):
        values = x.float()
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * values.to(x.dtype)


class EngineExperts(nn.Module):
    """Experts that take their routing from the block and their weights one expert at a time."""

    names = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}

    def __init__(self, experts):
        super().__init__()
        self.experts, self.calls = experts, 0

    def forward(self, hidden_states, top_k_index, top_k_weights):
        self.calls += 1
        assert hidden_states.dim() == 2
        assert top_k_index.shape == top_k_weights.shape == (len(hidden_states), top_k_index.shape[-1])
        return self.experts(hidden_states, top_k_index, top_k_weights)

    def load(self, expert: int, name: str, weight: torch.Tensor) -> None:
        """Put the matrix of one expert that has this name on disk where the engine keeps it."""
        match self.names[name]:
            case "gate":
                self.experts.gate_up_proj.data[expert, : len(weight)] = weight
            case "up":
                self.experts.gate_up_proj.data[expert, len(weight) :] = weight
            case "down":
                self.experts.down_proj.data[expert] = weight


def replace_modules(model: nn.Module) -> None:
    """Put the engine's modules in the place of norms and experts."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, EngineNorm(child))
            elif name == "experts":
                setattr(parent, name, EngineExperts(child))


def materialise(model: nn.Module, dtype: torch.dtype) -> None:
    """Make every parameter real, whatever its dtype in this one, without a value yet."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type == "meta":
                setattr(module, name, nn.Parameter(torch.full_like(parameter, torch.nan, dtype=dtype, device="cpu")))


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load every tensor on disk by its name; of Transformers' conversions, only renamings are made."""
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    for file in folder.glob("*.safetensors"):
        for name, weight in load_file(file).items():
            for renaming in renamings:
                name, _ = renaming.rename_source_key(name)
            name = name.removeprefix("model.")
            if found := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name):
                module, expert, matrix = found.groups()
                model.get_submodule(module).load(int(expert), matrix, weight)
            elif not name.startswith("lm_head."):
                model.get_parameter(name).data.copy_(weight)
    missing = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    assert not missing, missing


@torch.no_grad()
def run(folder: Path, dtype: torch.dtype, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Hidden states of one sequence, and the number of calls of experts."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config._attn_implementation, config.dtype = NAME, dtype
    with init_empty_weights(include_buffers=False):
        model = AutoModel.from_config(config, dtype=dtype, trust_remote_code=True).eval()
    assert model.is_backend_compatible()
    replace_modules(model)
    materialise(model, dtype)
    load_weights(model, folder)
    outputs = model(
        input_ids=ids[None],
        inputs_embeds=None,
        use_cache=False,
        position_ids=torch.arange(len(ids))[None],
        forward_batch=object(),
        attention_instances={i: EngineAttention(config) for i in range(config.num_hidden_layers)},
        return_dict=False,
    )
    return outputs[0][0], sum(module.calls for module in model.modules() if isinstance(module, EngineExperts))


def main() -> None:
    job = json.load(sys.stdin)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    ALL_ATTENTION_FUNCTIONS[NAME] = attend
    ids = torch.tensor(job["ids"])
    torch.save([run(Path(folder), getattr(torch, dtype), ids) for folder, dtype in job["cases"]], job["result"])


if __name__ == "__main__":
    main()
