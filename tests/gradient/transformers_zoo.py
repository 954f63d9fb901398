"""Small transformers with random weights, built by Hugging Face's own code: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WORDS, LENGTH = 24, 7
SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ROTARY = SMALL | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}


def bert(**options: Any) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**SMALL, **NO_DROPOUT, **{"num_labels": 3} | options))


def masked_bert() -> nn.Module:
    """Its head is tied to its embedding."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SMALL, **NO_DROPOUT))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=1, eos_token_id=2))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**ROTARY))


def qwen() -> nn.Module:
    """Norms of queries and keys, a tied head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**ROTARY, head_dim=4, tie_word_embeddings=True))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    return ViTForImageClassification(
        ViTConfig(
            **sizes, **NO_DROPOUT, num_attention_heads=4, image_size=8, patch_size=4, num_channels=3, num_labels=3
        )
    )


def t5() -> nn.Module:
    """The encoder and the decoder; relative positions, RMS norms, a tied head."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": WORDS, "d_model": 16, "d_ff": 24, "d_kv": 4, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, use_cache=False)
    )


def with_lora(model: nn.Module, **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    given = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "init_lora_weights": False} | options
    adapted: nn.Module = get_peft_model(model, LoraConfig(**given))  # type: ignore[arg-type]
    return adapted


def tokens(count: int) -> dict[str, Tensor]:
    ids = torch.randint(1, WORDS, (count, LENGTH))
    lengths = torch.randint(2, LENGTH + 1, (count, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def pairs(count: int) -> dict[str, Tensor]:
    return tokens(count) | {"decoder_input_ids": torch.randint(1, WORDS, (count, 5))}


def pixels(count: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(count, 3, 8, 8)}


def classes(outputs: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, targets, reduction="none")


def next_words(outputs: Any, targets: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(outputs.logits.transpose(1, 2), targets, reduction="none")
    return losses.mean(1)


Case = tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]], Callable[[Any, Tensor], Tensor], Any]


def labels(count: int) -> Tensor:
    return torch.randint(0, 3, (count,))


def words(length: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randint(0, WORDS, (count, length))


ZOO: dict[str, Case] = {
    "bert": (bert, tokens, classes, labels),
    "masked bert": (masked_bert, tokens, next_words, words(LENGTH)),
    "gpt2": (gpt2, tokens, next_words, words(LENGTH)),
    "llama": (llama, tokens, next_words, words(LENGTH)),
    "qwen": (qwen, tokens, next_words, words(LENGTH)),
    "vit": (vit, pixels, classes, labels),
    "t5": (t5, pairs, next_words, words(5)),
    "bert, lora": (
        lambda: with_lora(bert(), target_modules=["query", "value"], task_type="SEQ_CLS"), tokens, classes, labels
    ),
    "gpt2, lora": (
        lambda: with_lora(gpt2(), target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True), tokens,
        next_words, words(LENGTH),
    ),
    "llama, lora": (
        lambda: with_lora(llama(), target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"), tokens, next_words,
        words(LENGTH),
    ),
}  # fmt: skip
