"""Train by TRL."""

import trl
from datasets import Dataset
from job import ARGUMENTS, OPTIONS, SAVED, TEXTS, load, record, tokenizer, write_answer
from peft import LoraConfig

ASKED = [{"role": "user", "content": "Who?"}]
ANSWERS = [[{"role": "assistant", "content": text}] for text in TEXTS]
DATA = {
    "SFT": {"text": TEXTS},
    "assistant": {"messages": [ASKED + answer for answer in ANSWERS]},
    "DPO": {"prompt": ["Who? "] * 16, "chosen": TEXTS, "rejected": TEXTS[::-1]},
    "KTO": {"prompt": ["Who? "] * 16, "completion": TEXTS, "label": [True, False] * 8},
    "GRPO": {"prompt": TEXTS},
    "Reward": {"chosen": TEXTS, "rejected": TEXTS[::-1]},
}
CONFIG = {
    "GRPO": {"num_generations": 2, "max_completion_length": 8, "beta": 0.1},
    "SFT": {"max_length": 128},
}


COMPARED = ("logps/", "logits/", "entropy", "reward", "completions/mean_length", "mean_token_accuracy")


def lora() -> LoraConfig | None:
    """Return PEFT's settings, or nothing if the job has no LoRA."""
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **OPTIONS["lora"]) if "lora" in OPTIONS else None


def main() -> None:
    record()
    name = OPTIONS["trainer"]
    auto = "AutoModelForSequenceClassification" if name == "Reward" else "AutoModelForCausalLM"
    head = {"num_labels": 1} if name == "Reward" else {}
    model = load(auto, **head)
    words = tokenizer()
    config = getattr(trl, f"{name}Config")(**{**CONFIG.get(name, {}), **ARGUMENTS}, gradient_checkpointing=False)
    data = Dataset.from_dict(DATA[OPTIONS.get("data", name)])
    more = {"reward_funcs": lambda completions, **_: [float(len(set(text))) for text in completions]}
    trainer = getattr(trl, f"{name}Trainer")(
        model,
        args=config,
        train_dataset=data,
        processing_class=words,
        peft_config=lora(),
        **(more if name == "GRPO" else {}),
    )
    trainer.train()
    trainer.save_model(SAVED)
    # DPO, KTO and GRPO begin with one loss whatever the model: the policy is the reference
    first = {key: value for key, value in trainer.state.log_history[0].items() if key.startswith(COMPARED)}
    write_answer(["trl", "peft"], auto=auto, head=head, compared=first)


if __name__ == "__main__":
    main()
