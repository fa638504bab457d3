"""Outputs as models write them, by tool format. The functions are those of answers.TOOLS."""

from __future__ import annotations

SAMPLES: dict[str, list[str]] = {
    "hermes": [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "S\\u00e3o \\"Paulo\\"", "where": {"a": [1, {}]}}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {"note": "ends with </tool_call>"}, "name": "get_weather"}\n</tool_call>\nDone.',
    ],
    "gpt_oss": [
        '<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Paris","days":3}<|call|>',
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is **4**.\n<|return|>",
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        'I will write it.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\ndef f():\n    return "</parameter> <b>"\n\n</parameter>\n<parameter=where>\n{"a": [1, 2.50]}\n</parameter>\n<parameter=metric>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>',
        "<function=get_weather>\n<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>",
    ],
    "glm45": [
        "\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        'Let me see.<tool_call>get_weather<arg_key>city</arg_key><arg_value>a </arg_value> b</arg_value><arg_key>names</arg_key><arg_value>["x", "y"]</arg_value></tool_call><tool_call>now</tool_call>',
    ],
    "minimax_m2": [
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
        'Looking.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">a\n"b"</parameter>\n<parameter name="where">{"x": null}</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ],
    "deepseek_v32": [
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        'Look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="where" string="false">{"a": 1.0}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ],
    "deepseek_v4": [
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    ],
    "deepseek_v3": [
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        'Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"note": "```"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ],
    "deepseek_v31": [
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        'Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "\\"}"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ],
    "kimi_k2": [
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
        'Let me look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:3<|tool_call_argument_begin|>{"where": {"a": "<|tool_call_end|>"}}<|tool_call_end|><|tool_call_begin|>functions.now:4<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>',
    ],
    "mistral": [
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}',
        'Sure.[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"names": ["[TOOL_CALLS]"]}[TOOL_CALLS]now[ARGS]{}',
        '[TOOL_CALLS]now{}[TOOL_CALLS] [{"name": "now", "arguments": {}}]',
    ],
    "mistral_json": [
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]',
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "]"}}, {"arguments": {}, "name": "now", "id": "abcdefghi"}]',
    ],
    "llama3_json": [
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "\\n;"}}; {"name": "now", "parameters": {}}',
    ],
    "granite": [
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        '<tool_call>[{"arguments": {"days": 3}, "name": "get_weather"}, {"name": "now", "arguments": {}}]',
    ],
    "granite4": [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
    ],
    "phi4_mini_json": [
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>',
        'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
    ],
    "json": [
        '{"name": "get_weather", "arguments": {"city": "Paris"}}',
        '```json\n[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "parameters": {}}]\n```',
    ],
    "pythonic": [
        '[get_weather(city="Paris", days=3)]',
        '[get_weather(\'it\\\'s\', where={\'a\': (1, None)}, metric=False, note="""x\n"y\\x41"""), now()]',
    ],
    "llama4_pythonic": [
        '<|python_start|>[get_weather(city="Paris", days=3)]<|python_end|>',
        '[get_weather(names=["a", "b"], level=-1.5e3), now()]',
    ],
    "gemma4": [
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
        'Let me see.\n<|tool_call>call:get_weather{where:{a:[1,true,null],"b":<|"|>"}<tool_call|>"<|"|>},names:[]}<tool_call|><|tool_call>call:now{}<tool_call|>',
    ],
    "functiongemma": [
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>",
        "<start_function_call>call:now{}<end_function_call><start_function_call>call:get_weather{names:[<escape>a<escape>]}<end_function_call>",
    ],
    "gemma3": [
        '```tool_code\nget_weather(city="Paris", days=3)\n```',
        'Sure.\n```tool_code\nprint(get_weather(city="Paris"))\nnow()\n```\n',
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        '```tool_call\n{"name": "now", "parameters": {}}\n```',
        '[get_weather(city="Paris")]',
    ],
}
