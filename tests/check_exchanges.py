"""Exchanges as a server would have answered them, for tests of what is made of them."""

from launcher.checks.exchange import Exchange


def exchange(text="", *, check="arithmetic", item="one", server="target", step="", tokens=None, finish="stop",
             http=200, problem=None, message=None, request=None, tool_calls=None, reasoning=None, prompt_tokens=20,
             top=None, **meta):  # fmt: skip
    """``top``: the margin of each output token. ``meta``: of meta_info."""
    choice = {
        "message": {"content": text, "tool_calls": tool_calls, "reasoning_content": reasoning},
        "finish_reason": finish,
        "response_token_ids": list(map(ord, text)) if tokens is None else list(tokens),
        "meta_info": meta,
    }
    if top is not None:
        choice["logprobs"] = {
            "content": [{"top_logprobs": [{"logprob": -1.0}, {"logprob": -1.0 - gap}]} for gap in top]
        }
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(choice["response_token_ids"])}
    response = {"choices": [choice], "usage": usage} if problem is None else None
    return Exchange(
        check, item, server, step, "/v1/chat/completions", request or {"max_tokens": 64}, http, response,
        problem, message, 0.0, 0.1,
    )  # fmt: skip
