"""Names of the roles in chats, in the spellings of the tools that write datasets."""

CALL = "tool_call"
ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "model": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "ai": "assistant",
    "tool": "tool", "observation": "tool", "ipython": "tool", "function": "tool",
    "tool_response": "tool", "tool-response": "tool", "function_response": "tool",
    "function-response": "tool", "tool_result": "tool", "function_call": CALL,
    "function-call": CALL, "tool_call": CALL, "tool-call": CALL, "function_calls": CALL,
    "tool_calls": CALL,
}  # fmt: skip
#: What a role may be mapped to by `roles` of a source; LLaMA-Factory and axolotl have these under
#: names of their own.
STANDARD_ROLES = ("system", "user", "assistant", "tool", CALL)
