"""The networks that no constant of an optimizer was chosen on: fixed by name and configuration beforehand, as
published or as their libraries make them, and run once."""

from __future__ import annotations

import functools

from torch import nn

from .network import Network
from .unseen_models import GCN, GRU, VAE, ActorCritic, Logits, table_mlp
from .unseen_text import MASK, SPAN_TOKENS


def bert() -> nn.Module:
    """BERT-Mini."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=MASK + 1, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=1024, max_position_embeddings=128, pad_token_id=None,
    )  # fmt: skip
    model = BertForMaskedLM(config)  # type: ignore[no-untyped-call,unused-ignore]
    return Logits(model, "input_ids")


def t5() -> nn.Module:
    """T5-Efficient-Tiny: four layers that read and four that write."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=SPAN_TOKENS, d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_heads=4, use_cache=False,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Logits(T5ForConditionalGeneration(config), "input_ids", "decoder_input_ids")


def mamba() -> nn.Module:
    """As the library configures it, but for the vocabulary, the width and the depth."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=256, hidden_size=128, num_hidden_layers=4, use_cache=False)
    model = MambaForCausalLM(config)  # type: ignore[no-untyped-call,unused-ignore]
    return Logits(model, "input_ids")


def mobilenet_v3() -> nn.Module:
    """The small one. Its first convolution has stride 1, as is common on images of 32x32."""
    from torchvision.models import mobilenet_v3_small  # type: ignore[import-not-found,unused-ignore]

    model = mobilenet_v3_small(weights=None, num_classes=10)
    model.features[0][0].stride = (1, 1)
    return model


def efficientnet_b0() -> nn.Module:
    """With its dropout and stochastic depth. Its first convolution has stride 1, too."""
    from torchvision.models import efficientnet_b0  # type: ignore[import-not-found,unused-ignore]

    model = efficientnet_b0(weights=None, num_classes=10)
    model.features[0][0].stride = (1, 1)
    return model


UNSEEN: dict[str, Network] = {
    "bert": Network("BERT, masked bytes", bert, "masked bytes", 6),
    "t5": Network("T5, spans of bytes", t5, "spans of bytes", 9),
    "gru": Network("nn.GRU, bytes", functools.partial(GRU, 384, 2), "bytes", 6),
    "mobilenet-v3": Network("MobileNetV3-Small", mobilenet_v3, "cifar shifted", 5),
    "efficientnet-b0": Network("EfficientNet-B0", efficientnet_b0, "cifar shifted", 12),
    "gcn": Network("GCN, Cora", functools.partial(GCN, 1433, 16, 7, 0.5), "cora", 1),
    "table": Network("MLP, batch norm, Adult", functools.partial(table_mlp, 108, 0.2), "adult", 1),
    "ppo": Network("PPO, CartPole", ActorCritic, "cart-pole", 4),
    "vae": Network("VAE, CIFAR-10", VAE, "cifar autoencoding", 3),
    "mamba": Network("Mamba, bytes", mamba, "short bytes", 9),
}
