"""LoRA on a vision-language model, tower included: recoup fit examples/today/vision_language.py --budget 60%"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

IMAGE = 255  # the word that stands for a patch of the picture


def target(batch=4, seq=96):
    """Returns a LLaVA with LoRA on its attention, in the tower as in the language model; one picture an example."""
    torch.manual_seed(0)
    small = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**small, image_size=32, patch_size=4),
        text_config=LlamaConfig(**small, vocab_size=256, use_cache=False),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
    )
    model = LlavaForConditionalGeneration(config)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    words = torch.randint(0, IMAGE, (batch, seq))
    ids = torch.cat([torch.full((batch, 64), IMAGE), words], dim=1)  # 8 x 8 patches, then text
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.randn(batch, 3, 32, 32),
        "labels": ids.masked_fill(ids == IMAGE, -100),
    }
    return {"model": model.train(), "batch": inputs, "optimizer": torch.optim.AdamW}
