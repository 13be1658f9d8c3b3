"""Models of transformers at their smallest configurations, trained on the loss that each returns."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.thirdparty.built import ROWS, STEPS, Builder, Built, Step, generator, tokens, without_dropout

# Every decoder takes these names; those that call a size otherwise map theirs onto them.
DECODER: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED: dict[str, Any] = {**DECODER, "intermediate_size": 24, "num_key_value_heads": 2}
WITHOUT_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def hugging_face(kind: str, config: str, sizes: dict[str, Any], **options: Any) -> nn.Module:
    """`transformers.<kind>` with a `transformers.<config>` of these sizes, in training mode without dropout."""
    import transformers

    net = getattr(transformers, kind)(getattr(transformers, config)(**sizes, **options))
    return without_dropout(net.train())


def own_loss(net: nn.Module, batch: Any) -> torch.Tensor:
    """The loss that the model itself returns."""
    return net(**batch).loss


def language_model(
    name: str, sizes: dict[str, Any], kind: str = "ForCausalLM", optimizer: str = "sgd", **more: Any
) -> Built:
    """A decoder that predicts every next token."""
    net = hugging_face(f"{name}{kind}", f"{name}Config", {**sizes, **WITHOUT_SPECIAL, **more})
    batches = [{"input_ids": ids, "labels": ids} for ids in tokens()]
    return Built(module=Step(net, own_loss, optimizer), batches=batches)


def encoder(name: str, kind: str, **more: Any) -> Built:
    """An encoder on padded sequences: masked words, or a class per sequence."""
    net = hugging_face(f"{name}{kind}", f"{name}Config", {**DECODER, "intermediate_size": 24, **more}, pad_token_id=0)
    return Built(module=Step(net, own_loss, "adamw"), batches=padded(masked="MaskedLM" in kind))


def padded(masked: bool) -> list[dict[str, torch.Tensor]]:
    """Sequences of unequal lengths with their masks; alike many words per half of the batch."""
    batches = []
    for index, ids in enumerate(tokens()):
        mask = torch.ones_like(ids)
        mask[0, 7 - index :] = mask[-1, 7 - index :] = 0
        ids = ids * mask
        labels = ids.masked_fill(mask == 0, -100) if masked else ids[:, 0] % 2
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


def unpadded_loss() -> Built:
    """A decoder whose labels are masked: ranks hold unequal counts of targets."""
    built = language_model("Llama", GROUPED)
    for batch in built.batches:
        batch["labels"] = batch["labels"].clone()
        batch["labels"][0, 3:] = -100
    return built


def t5() -> Built:
    """Encoder and decoder, with a shift of the labels in the model."""
    sizes = {
        "vocab_size": 50,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
    }
    net = hugging_face("T5ForConditionalGeneration", "T5Config", sizes, decoder_start_token_id=0)
    batches = [{"input_ids": ids, "labels": ids[:, :6].contiguous()} for ids in tokens()]
    return Built(module=Step(net, own_loss, "adamw"), batches=batches)


def switch_transformers() -> Built:
    """Encoder and decoder whose experts are called where a row of this rank is sent to them."""
    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4, "dropout_rate": 0.0}
    for layers in ("num_layers", "num_decoder_layers"):
        sizes[layers] = 2
    sizes.update(num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=4, expert_capacity=8)
    sizes["router_jitter_noise"] = 0.0
    name = "SwitchTransformers"
    net = hugging_face(f"{name}ForConditionalGeneration", f"{name}Config", sizes, decoder_start_token_id=0)
    batches = [{"input_ids": ids, "labels": ids[:, :6].contiguous()} for ids in tokens()]
    return Built(module=Step(net, own_loss), batches=batches)


def bart() -> Built:
    """Encoder and decoder with learned positions."""
    sizes = {"vocab_size": 50, "d_model": 16, "max_position_embeddings": 32}
    for side in ("encoder", "decoder"):
        sizes.update({f"{side}_layers": 1, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 24})
    net = hugging_face("BartForConditionalGeneration", "BartConfig", {**sizes, **WITHOUT_SPECIAL}, dropout=0.0)
    batches = [{"input_ids": ids, "labels": ids[:, :6].contiguous()} for ids in tokens()]
    return Built(module=Step(net, own_loss), batches=batches)


AUDIO: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}


def speech(kind: str) -> Built:
    """Raw audio to letters by CTC."""
    net = hugging_face(f"{kind}ForCTC", f"{kind}Config", {**AUDIO, "vocab_size": 20}, ctc_loss_reduction="mean")
    random = generator()
    batches = [
        {
            "input_values": torch.randn(ROWS, 400, generator=random),
            "labels": torch.randint(1, 20, (ROWS, 5), generator=random),
        }
        for _ in range(STEPS)
    ]
    return Built(module=Step(net, own_loss), batches=batches)


def whisper() -> Built:
    """Spectrograms to text."""
    sizes = {
        "vocab_size": 50,
        "num_mel_bins": 8,
        "d_model": 16,
        "max_source_positions": 12,
        "max_target_positions": 16,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    for side in ("encoder", "decoder"):
        sizes.update({f"{side}_layers": 1, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 24})
    net = hugging_face("WhisperForConditionalGeneration", "WhisperConfig", {**sizes, **WITHOUT_SPECIAL})
    random = generator()
    batches = [{"input_features": torch.randn(ROWS, 8, 24, generator=random), "labels": ids} for ids in tokens()]
    return Built(module=Step(net, own_loss), batches=batches)


TEXT = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


def clip() -> Built:
    """Images against texts: every pair of the batch is compared."""
    text = {**TEXT, "max_position_embeddings": 16, "projection_dim": 16, "eos_token_id": 2}
    sizes = {"text_config": text, "vision_config": {**VISION, "projection_dim": 16}, "projection_dim": 16}
    net = hugging_face("CLIPModel", "CLIPConfig", sizes)
    random = generator()
    batches = [
        {"input_ids": ids, "pixel_values": torch.randn(ROWS, 3, 16, 16, generator=random), "return_loss": True}
        for ids in tokens()
    ]
    return Built(module=Step(net, own_loss), batches=batches)


def image_classifier(name: str, **sizes: Any) -> Built:
    """Images to classes."""
    net = hugging_face(f"{name}ForImageClassification", f"{name}Config", sizes, num_labels=5)
    random = generator()
    batches = [
        {
            "pixel_values": torch.randn(ROWS, 3, 32, 32, generator=random),
            "labels": torch.randint(0, 5, (ROWS,), generator=random),
        }
        for _ in range(STEPS)
    ]
    return Built(module=Step(net, own_loss), batches=batches)


def masked_autoencoder() -> Built:
    """ViTMAE, with the noise that says what is masked in the batch."""
    sizes = {**VISION, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4}
    net = hugging_face("ViTMAEForPreTraining", "ViTMAEConfig", {**sizes, "decoder_intermediate_size": 24})
    random = generator()
    batches = [
        {
            "pixel_values": torch.randn(ROWS, 3, 16, 16, generator=random),
            "noise": torch.rand(ROWS, 4, generator=random),
        }
        for _ in range(STEPS)
    ]
    return Built(module=Step(net, own_loss, "adamw"), batches=batches)


def vision_language(name: str) -> Built:
    """Text with an image in it: LLaVA's and PaliGemma's way of putting the image's features among the words."""
    vision = {"model_type": "siglip_vision_model" if name == "PaliGemma" else "clip_vision_model", **VISION}
    text = {"model_type": "gemma" if name == "PaliGemma" else "llama", **TEXT, "num_key_value_heads": 2, "head_dim": 4}
    sizes = {"vision_config": vision, "text_config": {**text, **WITHOUT_SPECIAL}, "image_token_index": 3}
    if name == "PaliGemma":
        vision.update(projection_dim=16, num_image_tokens=4)
        sizes.update(projection_dim=16, hidden_size=16, image_token_id=3)
    else:
        sizes.update(vision_feature_layer=-1, image_token_id=3)
    net = hugging_face(f"{name}ForConditionalGeneration", f"{name}Config", sizes)
    random, batches = generator(), []
    for ids in tokens():
        ids = torch.cat([torch.full((ROWS, 4), 3), ids], dim=1)
        batch = {"input_ids": ids, "labels": ids.masked_fill(ids == 3, -100), "attention_mask": torch.ones_like(ids)}
        batch["pixel_values"] = torch.randn(ROWS, 3, 16, 16, generator=random)
        if name == "PaliGemma":
            batch["token_type_ids"] = torch.ones_like(ids)
        batches.append(batch)
    return Built(module=Step(net, own_loss), batches=batches)


def question_answering() -> Built:
    """Spans: two positions per sequence."""
    net = hugging_face("BertForQuestionAnswering", "BertConfig", {**DECODER, "intermediate_size": 24})
    batches = [
        {"input_ids": ids, "start_positions": ids[:, 0] % 10, "end_positions": ids[:, 1] % 10} for ids in tokens()
    ]
    return Built(module=Step(net, own_loss), batches=batches)


MIXTURE = {**GROUPED, "num_experts_per_tok": 2, "output_router_logits": True}
QWEN_MIXTURE = {
    **MIXTURE,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
GPT2 = {"vocab_size": 50, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}
OPT = {**DECODER, "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0, "layerdrop": 0.0}
FALCON = {**DECODER, "new_decoder_architecture": True, "num_kv_heads": 2}
STATES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
DISTIL = {"vocab_size": 50, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
CONVNEXT = {"num_channels": 3, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.0}

MODELS: dict[str, Builder] = {
    "llama": partial(language_model, "Llama", GROUPED, optimizer="adamw"),
    "llama_masked_labels": unpadded_loss,
    "mistral": partial(language_model, "Mistral", {**GROUPED, "sliding_window": 6}),
    "qwen2": partial(language_model, "Qwen2", GROUPED),
    "qwen3": partial(language_model, "Qwen3", {**GROUPED, "head_dim": 4}),
    "gemma": partial(language_model, "Gemma", {**GROUPED, "head_dim": 4}),
    "gemma2": partial(language_model, "Gemma2", {**GROUPED, "head_dim": 4, "sliding_window": 6}),
    "gpt2": partial(language_model, "GPT2", GPT2, "LMHeadModel", "adamw"),
    "gpt_neox": partial(language_model, "GPTNeoX", {**DECODER, "intermediate_size": 24}),
    "opt": partial(language_model, "OPT", OPT),
    "falcon": partial(language_model, "Falcon", FALCON),
    "phi": partial(language_model, "Phi", {**DECODER, "intermediate_size": 24}),
    "bloom": partial(language_model, "Bloom", {"vocab_size": 50, "hidden_size": 16, "n_layer": 2, "n_head": 4}),
    "mixtral": partial(language_model, "Mixtral", {**MIXTURE, "num_local_experts": 4}),
    "qwen2_moe": partial(language_model, "Qwen2Moe", QWEN_MIXTURE),
    "mamba": partial(language_model, "Mamba", STATES),
    "mamba2": partial(
        language_model, "Mamba2", {**STATES, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
    ),
    "bert": partial(encoder, "Bert", "ForMaskedLM"),
    "bert_answers": question_answering,
    "roberta": partial(encoder, "Roberta", "ForSequenceClassification"),
    "distilbert": partial(encoder, "DistilBert", "ForSequenceClassification", **DISTIL),
    "electra": partial(encoder, "Electra", "ForSequenceClassification", embedding_size=16),
    "albert": partial(encoder, "Albert", "ForMaskedLM", embedding_size=8),
    "deberta_v2": partial(encoder, "DebertaV2", "ForSequenceClassification", relative_attention=True),
    "t5": t5,
    "switch_transformers": switch_transformers,
    "bart": bart,
    "wav2vec2": partial(speech, "Wav2Vec2"),
    "hubert": partial(speech, "Hubert"),
    "whisper": whisper,
    "clip": clip,
    "vit": partial(image_classifier, "ViT", **{**VISION, "image_size": 32}),
    "swin": partial(image_classifier, "Swin", **SWIN, drop_path_rate=0.0),
    "convnext": partial(image_classifier, "ConvNext", **CONVNEXT),
    "vit_mae": masked_autoencoder,
    "llava": partial(vision_language, "Llava"),
    "paligemma": partial(vision_language, "PaliGemma"),
}
