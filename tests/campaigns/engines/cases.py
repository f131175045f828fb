"""What is served, and how."""

from dataclasses import dataclass, field, replace

from transformers import LlamaConfig, OlmoeConfig, Qwen3Config

# heads of 64 channels, the smallest that attention on a CPU takes, and as many as two processes can share
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
BASES = {
    "Llama": LlamaConfig(**SIZES),
    "Qwen3": Qwen3Config(**SIZES, head_dim=64),
    "OLMoE": OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2),
}
CONNECTIONS = {
    "DHC×4": {},
    "DHC×4, history": {"hc_start": "history"},
    "SHC×4": {"connection": "shc"},
    "mHC×4": {"connection": "mhc"},
    "attention residuals": {"connection": "attnres"},
    "skips": {"connection": "skip"},
}


@dataclass(frozen=True)
class Case:
    """A folder, and what an engine does with it.

    engine: a key of `environments.ENGINES`.
    base: a key of `BASES`. connection: of `CONNECTIONS`; None for the base itself.
    is_trained: whether its connections are no longer those of the start. has_adapter: whether LoRA is asked for.
    dtype: that the engine computes in.
    does: what it does besides, for the table.
    options: of `vllm.LLM` or `sglang.Engine`. by_server: whether an OpenAI client asks, eight requests at once.
    """

    base: str
    connection: str | None = "DHC×4"
    is_trained: bool = False
    has_adapter: bool = False
    dtype: str = "float32"
    does: str = ""
    options: dict = field(default_factory=dict, hash=False)
    by_server: bool = False
    engine: str = "vLLM"

    @property
    def has_two_processes(self) -> bool:
        """Whether the engine shards it."""
        return not self.options.keys().isdisjoint(("tensor_parallel_size", "tp_size"))

    @property
    def name(self) -> str:
        """The folder's name."""
        parts = [self.base, self.connection, "trained" if self.is_trained else None]
        return " ".join(filter(None, parts)).replace(",", "").replace("×", "x").replace(" ", "-")


EVERYWHERE = (
    *(Case(base, None, dtype=dtype) for base in BASES for dtype in ("float32", "bfloat16")),
    *(Case(base, dtype=dtype) for base in BASES for dtype in ("float32", "bfloat16")),
    *(Case("Llama", connection) for connection in CONNECTIONS if connection != "DHC×4"),
    *(Case(base, is_trained=True) for base in BASES),
    *(Case("Llama", connection, is_trained=True) for connection in CONNECTIONS if connection != "DHC×4"),
    Case("Llama", is_trained=True, dtype="bfloat16"),
)
COMPILED, TWO_PROCESSES = {"enforce_eager": False}, {"tensor_parallel_size": 2}
# SGLang knows no plan like OLMoE's for tensor parallelism, and refuses it though there is one process
PLANLESS = {"json_model_override_args": '{"base_model_tp_plan": {}}'}
CASES = (
    *EVERYWHERE,
    Case("Llama", is_trained=True, does="compiled", options=COMPILED),
    Case("Llama", is_trained=True, does="tensor parallel, 2", options=TWO_PROCESSES),
    Case("OLMoE", is_trained=True, does="tensor parallel, 2", options=TWO_PROCESSES),
    Case("Llama", is_trained=True, has_adapter=True, does="LoRA"),
    Case("Llama", is_trained=True, does="OpenAI server, 8 requests at once", by_server=True),
    *(replace(case, engine="SGLang", options=PLANLESS if case.base == "OLMoE" else {}) for case in EVERYWHERE),
    Case("Llama", is_trained=True, does="tensor parallel, 2", options={"tp_size": 2}, engine="SGLang"),
)
