"""Tests of `generate` on the generative classes of a family."""

import copy

import torch
from parameterized import parameterized
from transformers import CompileConfig, ContinuousBatchingConfig, DynamicCache, StaticCache, set_seed
from transformers.testing_utils import torch_device

from tests.tolerances import CACHED, HALF_PRECISION

NEW_TOKENS = 6


class GenerationTesterMixin:
    """For test classes with `ModelTesterMixin`. What a way of generating is compared with is written out here: the
    whole sequence through the model for every token, without a cache.
    """

    def skip_if_stateful(self):
        """Of models that keep a state of what they have read, instead of keys and values of every token."""
        if any(model_class._is_stateful for model_class in self.all_generative_model_classes):
            self.skipTest("its state has no length, and can't be cut back to an earlier token")

    def generative_models(self, **changes):
        """A model of every generative class and a prompt; its weights leave no two tokens nearly as likely."""
        for model_class in self.all_generative_model_classes:
            config, _ = self.model_tester.prepare_config_and_inputs_for_common()
            config.initializer_range = 0.3
            for name, value in changes.items():
                setattr(config, name, value)
            set_seed(0)
            model = model_class(copy.deepcopy(config)).to(torch_device).eval()
            model.generation_config.eos_token_id = None
            model.generation_config.max_new_tokens = NEW_TOKENS
            model.generation_config.do_sample = False
            yield model, self.model_tester.get_input_ids(config, batch_size=2)

    @torch.no_grad()
    def greedy(self, model, input_ids, attention_mask=None):
        """The greedy continuation and the logits of its tokens `[batch, tokens, vocabulary]`, step by step."""
        logits = []
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        for _ in range(NEW_TOKENS):
            position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
            outputs = model(input_ids=input_ids, attention_mask=mask, position_ids=position_ids, use_cache=False)
            logits.append(outputs.logits[:, -1].float())
            input_ids = torch.cat([input_ids, logits[-1].argmax(-1, keepdim=True)], dim=-1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=-1)
        return input_ids, torch.stack(logits, dim=1)

    def check_greedy(self, model, input_ids, **kwargs):
        """Check the tokens and the logits of `generate(input_ids, **kwargs)`; returns its output."""
        outputs = model.generate(input_ids, return_dict_in_generate=True, output_logits=True, **kwargs)
        tokens, logits = self.greedy(model, input_ids, kwargs.get("attention_mask"))
        torch.testing.assert_close(torch.stack(outputs.logits, dim=1), logits, **CACHED)
        assert outputs.sequences.tolist() == tokens.tolist()
        return outputs

    @parameterized.expand([("cache", True), ("no_cache", False)])
    def test_greedy_generate(self, name, use_cache):
        for model, input_ids in self.generative_models():
            outputs = self.check_greedy(model, input_ids, use_cache=use_cache)
            assert (outputs.past_key_values is not None) == use_cache

    @parameterized.expand([("dynamic",), ("static",)])
    def test_generate_with_cache_implementation(self, implementation):
        for model, input_ids in self.generative_models():
            outputs = self.check_greedy(model, input_ids, cache_implementation=implementation)
            assert isinstance(outputs.past_key_values, StaticCache if "static" in implementation else DynamicCache)

    @parameterized.expand([("dynamic",), ("static",)])
    def test_generate_beyond_sliding_window(self, implementation):
        config = self.model_tester.get_config()
        if not hasattr(config, "sliding_window"):
            self.skipTest("the family has no sliding window")
        changes = {"sliding_window": 4, "use_sliding_window": True}
        if hasattr(config, "layer_types"):
            changes["layer_types"] = ["sliding_attention", "full_attention"]
        for model, input_ids in self.generative_models(**changes):
            outputs = self.check_greedy(model, input_ids, cache_implementation=implementation)
            assert outputs.past_key_values.layers[0].is_sliding

    def test_cache_shapes(self):
        self.skip_if_stateful()
        for model, input_ids in self.generative_models():
            cache = model.generate(input_ids, return_dict_in_generate=True).past_key_values
            config = model.config
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            expected = (2, config.num_key_value_heads, input_ids.shape[1] + NEW_TOKENS - 1, head_dim)
            assert len(cache.layers) == config.num_hidden_layers
            for layer in cache.layers:
                assert layer.keys.shape == expected
                assert layer.values.shape == expected

    def test_generate_left_padded(self):
        for model, input_ids in self.generative_models():
            padding = torch.zeros_like(input_ids[:, :3])
            padded = torch.cat([padding, input_ids], dim=-1)
            mask = torch.cat([padding, torch.ones_like(input_ids)], dim=-1)
            outputs = self.check_greedy(model, padded, attention_mask=mask)
            alone, logits = self.greedy(model, input_ids)
            assert outputs.sequences[:, 3:].tolist() == alone.tolist()
            torch.testing.assert_close(torch.stack(outputs.logits, dim=1), logits, **CACHED)

    def test_generate_rows_of_different_length(self):
        for model, input_ids in self.generative_models():
            mask = torch.ones_like(input_ids)
            mask[0, :3] = 0
            outputs = self.check_greedy(model, input_ids.masked_fill(mask == 0, 0), attention_mask=mask)
            for row, start in enumerate([3, 0]):
                alone, _ = self.greedy(model, input_ids[row : row + 1, start:])
                assert outputs.sequences[row, start:].tolist() == alone[0].tolist()

    def test_generate_from_inputs_embeds(self):
        for model, input_ids in self.generative_models():
            tokens, _ = self.greedy(model, input_ids)
            embeds = model.get_input_embeddings()(input_ids)
            from_embeds = model.generate(inputs_embeds=embeds)
            assert from_embeds.tolist() == tokens[:, input_ids.shape[1] :].tolist()
            both = model.generate(input_ids, inputs_embeds=embeds)
            assert both.tolist() == tokens.tolist()

    @parameterized.expand([("dynamic",), ("static",)])
    def test_generate_continues_from_past_key_values(self, implementation):
        self.skip_if_stateful()
        for model, input_ids in self.generative_models():
            length = input_ids.shape[1] + NEW_TOKENS
            config = model.config
            cache = DynamicCache(config=config) if implementation == "dynamic" else StaticCache(config, length)
            first = model.generate(input_ids, past_key_values=cache, max_new_tokens=2)
            tokens, _ = self.greedy(model, input_ids)
            assert first.tolist() == tokens[:, : input_ids.shape[1] + 2].tolist()
            second = model.generate(first, past_key_values=cache, max_new_tokens=NEW_TOKENS - 2)
            assert second.tolist() == tokens.tolist()

    def test_generate_with_chunked_prefill(self):
        self.skip_if_stateful()
        for model, input_ids in self.generative_models():
            self.check_greedy(model, input_ids, prefill_chunk_size=3)

    def test_logits_to_keep(self):
        for model, input_ids in self.generative_models():
            with torch.no_grad():
                every = model(input_ids).logits
                for keep in (1, 3, torch.tensor([0, 4])):
                    kept = model(input_ids, logits_to_keep=keep).logits
                    expected = every[:, -keep:] if isinstance(keep, int) else every[:, keep]
                    torch.testing.assert_close(kept, expected)

    def test_sample_generate(self):
        for model, input_ids in self.generative_models():
            outputs = []
            for seed in (0, 0, 1):
                set_seed(seed)
                outputs.append(model.generate(input_ids, do_sample=True, num_return_sequences=3))
            assert outputs[0].shape == (6, input_ids.shape[1] + NEW_TOKENS)
            assert outputs[0][::3, : input_ids.shape[1]].tolist() == input_ids.tolist()
            assert torch.equal(outputs[0], outputs[1])
            assert not torch.equal(outputs[0], outputs[2])
            only_the_best = model.generate(input_ids, do_sample=True, top_k=1)
            assert only_the_best.tolist() == self.greedy(model, input_ids)[0].tolist()

    @parameterized.expand([("cache", {}), ("no_cache", {"use_cache": False}), ("sample", {"do_sample": True})])
    def test_beam_search_generate(self, name, kwargs):
        for model, input_ids in self.generative_models():
            beams = {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.0, **kwargs}
            outputs = model.generate(input_ids, return_dict_in_generate=True, output_scores=True, **beams)
            length = input_ids.shape[1]
            assert outputs.sequences.shape == (4, length + NEW_TOKENS)
            assert outputs.sequences[::2, :length].tolist() == input_ids.tolist()
            with torch.no_grad():
                log_probabilities = model(outputs.sequences[:, :-1], use_cache=False).logits.float().log_softmax(-1)
            chosen = log_probabilities[:, length - 1 :].gather(-1, outputs.sequences[:, length:, None]).sum((1, 2))
            if "do_sample" not in kwargs:
                torch.testing.assert_close(outputs.sequences_scores, chosen, **CACHED)

    def test_beam_search_with_every_beam_finds_the_likeliest(self):
        for model, input_ids in self.generative_models():
            size = model.config.vocab_size
            outputs = model.generate(input_ids, num_beams=size, max_new_tokens=2)
            with torch.no_grad():
                first = model(input_ids).logits[:, -1].log_softmax(-1)
                for row, prompt in enumerate(input_ids):
                    every = torch.cat([prompt.repeat(size, 1), torch.arange(size)[:, None]], dim=-1)
                    scores = first[row, :, None] + model(every).logits[:, -1].log_softmax(-1)
                    assert outputs[row, -2:].tolist() == list(divmod(scores.argmax().item(), size))

    @parameterized.expand([("assistant",), ("poor_assistant",), ("prompt_lookup",)])
    def test_assisted_generate(self, kind):
        self.skip_if_stateful()
        for model, input_ids in self.generative_models():
            prompt = input_ids[:1].repeat(1, 2)
            assistant = copy.deepcopy(model)
            if kind == "poor_assistant":
                torch.nn.init.normal_(assistant.get_output_embeddings().weight)
            assistant.generation_config.num_assistant_tokens = 3
            kwargs = {"prompt_lookup_num_tokens": 2} if kind == "prompt_lookup" else {"assistant_model": assistant}
            self.check_greedy(model, prompt, **kwargs)

    @parameterized.expand([("greedy", 1), ("beam", 3)])
    def test_generate_outputs(self, name, num_beams):
        if not self.has_attentions:
            self.skipTest("the family has no attention")
        for model, input_ids in self.generative_models():
            model.set_attn_implementation("eager")
            wanted = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
            kwargs = dict.fromkeys((*wanted, "return_dict_in_generate"), True)
            outputs = model.generate(input_ids, num_beams=num_beams, **kwargs)
            config, rows, length = model.config, 2 * num_beams, input_ids.shape[1]
            for values in (outputs.scores, outputs.logits):
                assert [value.shape for value in values] == [(rows, config.vocab_size)] * NEW_TOKENS
            assert (len(outputs.hidden_states), len(outputs.attentions)) == (NEW_TOKENS, NEW_TOKENS)
            for step, (states, attentions) in enumerate(zip(outputs.hidden_states, outputs.attentions, strict=True)):
                queries, keys = (1 if step else length), length + step
                shapes = [(rows, queries, config.hidden_size)] * (config.num_hidden_layers + 1)
                assert [state.shape for state in states] == shapes
                shapes = [(rows, config.num_attention_heads, queries, keys)] * config.num_hidden_layers
                assert [attention.shape for attention in attentions] == shapes

    def test_generate_stops_at_eos(self):
        for model, input_ids in self.generative_models():
            tokens, _ = self.greedy(model, input_ids)
            eos = tokens[0, input_ids.shape[1] + 1].item()
            stopped = model.generate(input_ids, eos_token_id=eos, pad_token_id=0)
            for row, expected in zip(stopped.tolist(), tokens.tolist(), strict=True):
                new = expected[input_ids.shape[1] :]
                end = input_ids.shape[1] + (new.index(eos) + 1 if eos in new else NEW_TOKENS)
                assert row[:end] == expected[:end]
                assert set(row[end:]) - {0} == set()

    @parameterized.expand([("eager",), ("sdpa",)])
    def test_generate_with_attention(self, implementation):
        for model, input_ids in self.generative_models():
            if implementation == "sdpa" and not model._supports_sdpa:
                self.skipTest("the family has no sdpa attention")
            model.set_attn_implementation(implementation)
            self.check_greedy(model, input_ids)

    @parameterized.expand([("bfloat16",), ("float16",)])
    def test_generate_in_half_precision(self, dtype):
        for model, input_ids in self.generative_models():
            model.to(getattr(torch, dtype))
            outputs = model.generate(input_ids, return_dict_in_generate=True, output_logits=True)
            with torch.no_grad():
                logits = model(outputs.sequences[:, :-1], use_cache=False).logits[:, input_ids.shape[1] - 1 :]
            torch.testing.assert_close(torch.stack(outputs.logits, dim=1), logits.float(), **HALF_PRECISION)

    def test_generate_with_continuous_batching(self):
        self.skip_if_stateful()
        for model, input_ids in self.generative_models():
            model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
            prompts = [input_ids[0, 2:].tolist(), input_ids[1].tolist()]
            small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32)
            outputs = model.generate_batch(prompts, model.generation_config, small)
            expected = [self.greedy(model, torch.tensor([prompt]))[0][0, len(prompt) :].tolist() for prompt in prompts]
            generated = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
            assert [generated[tuple(prompt)] for prompt in prompts] == expected

    def test_generate_compiled(self):
        for model, input_ids in self.generative_models():
            torch.compiler.reset()
            compile_config = CompileConfig(fullgraph=True, mode="default")
            compile_config._compile_all_devices = True
            self.check_greedy(model, input_ids, cache_implementation="static", compile_config=compile_config)
            assert hasattr(model, "_compiled_call")
