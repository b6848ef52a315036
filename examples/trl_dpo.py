"""TRL's DPO inside a byte budget: python examples/trl_dpo.py"""

import copy
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from recoup.integrations.transformers import RecoupCallback, fit_trainer

words = ["<pad>", "<eos>", *(f"w{i}" for i in range(62))]  # yours: AutoTokenizer.from_pretrained(...)
word_level = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
word_level.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level, pad_token="<pad>", eos_token="<eos>")
model = LlamaForCausalLM(
    LlamaConfig(num_hidden_layers=3, hidden_size=192, intermediate_size=576, num_attention_heads=2, vocab_size=64)
)
rows = [{"prompt": "w1 " * 32, "chosen": "w2 w3 " * 48, "rejected": "w4 w5 " * 48} for _ in range(16)]

with tempfile.TemporaryDirectory() as folder:
    args = DPOConfig(
        folder, max_steps=4, per_device_train_batch_size=8, gradient_checkpointing=False, use_cpu=True, report_to=[]
    )
    reference = copy.deepcopy(model)
    trainer = DPOTrainer(model, reference, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    found = fit_trainer(trainer, budget="80%")  # the one line before train()
    watching = RecoupCallback(found.plan)
    trainer.add_callback(watching)
    trainer.train()
print(found)
print(watching.report())
