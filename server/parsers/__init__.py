"""Text of a model in, events out: content, reasoning, tool calls.

Choose formats once per model:

    tool_format, why = registry.choose_tools(template_source, has_token)            # or registry.tool_format(name)
    reasoning, why = registry.choose_reasoning(template_source, has_token)          # or registry.reasoning_format(name)
    tool_format.markers, reasoning.markers     # special tokens that detokenization must not hide

Parse each choice of a request:

    tools = [Tool(name, parameters, strict), ...]                                   # that the request allows
    parser = AnswerParser(tool_format, reasoning, tools, opened=reasoning.opened(prompt_text))
    events = parser.push(text)                                                      # as the text arrives
    events = parser.finish()                                                        # once, at the end

`JsonWriter` turns all arguments into JSON; `model_json.read` parses such text.

Either format may be None. A `ToolCallBegin` without `call_id` gets `tool_format.call_id(name, index)`, or if that is
None, an id of the dialect's own.

Enforce calls:

    tag = tool_format.structure(tools, required=..., parallel=...)                  # a structural tag, or None

The grammar starts after `reasoning.end` where the answer begins with thoughts, and at the first token if
`tool_format.covers_reasoning`. `reasoning.forced_end` is the text that ends thoughts whose budget is spent.
"""
