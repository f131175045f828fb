"""Values for the fields that every config of Transformers accepts, none of them the default."""

config_common_kwargs = {
    "architectures": ["SomeModel"],
    "chunk_size_feed_forward": 3,
    "dtype": "float16",
    "id2label": {0: "no", 1: "maybe", 2: "yes"},
    "label2id": {"no": 0, "maybe": 1, "yes": 2},
    "output_attentions": True,
    "output_hidden_states": True,
    "problem_type": "multi_label_classification",
    "return_dict": False,
}
