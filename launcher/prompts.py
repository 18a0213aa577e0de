"""Prompts for a run of several servers: a JSON list of {name, messages, max_new_tokens?, tools?}."""

import json
from pathlib import Path

from launcher.flags import UsageError


def load_prompts(file, model):
    """The prompts of ``file`` with their token ids under the model's own chat template.

    Raises: UsageError for a file that is no such list or is empty, or a model without a tokenizer.
    """
    prompts = _read(file)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise UsageError(f"{model}: its tokenizer cannot be loaded ({error})") from None
    for prompt in prompts:
        prompt["input_ids"] = tokenizer.apply_chat_template(
            prompt["messages"],
            tools=prompt.get("tools"),
            add_generation_prompt=True,
            return_dict=False,
        )
    return prompts


def _read(file):
    try:
        prompts = json.loads(Path(file).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"the prompts cannot be read from {file} ({error})") from None
    if not isinstance(prompts, list) or not prompts:
        raise UsageError(f"{file} has no prompts: a list with at least one is needed")
    for number, prompt in enumerate(prompts, 1):
        fields = prompt if isinstance(prompt, dict) else {}
        tokens = fields.get("max_new_tokens", 1)
        if not (
            isinstance(fields.get("name"), str)
            and isinstance(fields.get("messages"), list)
            and fields["messages"]
            and type(tokens) is int
            and tokens > 0
        ):
            raise UsageError(
                f"prompt {number} in {file} needs a name, messages and a max_new_tokens above 0"
            )
    return prompts
