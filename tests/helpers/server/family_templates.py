"""Defines short chat templates in the formats of model families that call tools and think, with the constructs in
which the families differ: the place of tools, the form of arguments and results, earlier turns' thoughts.
"""

DEEPSEEK_V3 = """\
{% set ns = namespace(system='', tools='') %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}\
{%- if tools %}{% for tool in tools %}{% set ns.tools = ns.tools + '\\n' + (tool | tojson) %}{% endfor %}{% endif %}\
{{ bos_token }}{{ ns.system }}{{ ns.tools }}\
{%- for message in messages %}\
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% endif %}\
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] %}\
{{- '<｜Assistant｜>' + (message['content'] or '') + '<｜tool▁calls▁begin｜>' }}\
{%- for tool in message['tool_calls'] %}{{ '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] \
+ '\\n```json\\n' + tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}\
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}\
{%- elif message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}\
{%- if message['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{% endif %}\
{%- endfor %}{% if add_generation_prompt and messages[-1]['role'] != 'tool' %}{{ '<｜Assistant｜>' }}{% endif %}"""

DEEPSEEK_V31 = """\
{% if not thinking is defined %}{% set thinking = false %}{% endif %}\
{{ bos_token }}{% for message in messages if message.role == 'system' %}{{ message.content }}{% endfor %}\
{%- if tools is defined and tools is not none %}{{ '\\n\\n## Tools\\n' }}{% for tool in tools %}\
{{ '### ' + tool.function.name + '\\nParameters: ' + (tool.function.parameters | tojson) + '\\n' }}{% endfor %}{% endif %}\
{%- for message in messages %}\
{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}{% endif %}\
{%- if message.role == 'assistant' %}{{ '<｜Assistant｜></think>' + (message.content or '') }}\
{%- if message.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for call in message.tool_calls %}\
{%- set arguments = call.function.arguments if call.function.arguments is string else call.function.arguments | tojson %}\
{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + arguments + '<｜tool▁call▁end｜>' }}{% endfor %}\
{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ '<｜end▁of▁sentence｜>' }}{% endif %}\
{%- if message.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}{% endif %}\
{%- endfor %}\
{%- if add_generation_prompt and messages[-1].role == 'user' %}{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}"""

GLM45 = """\
[gMASK]<sop>
{%- if tools %}
<|system|>
# Tools
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>
{{ m.content }}{{ '/nothink' if enable_thinking is defined and not enable_thinking }}
{%- elif m.role == 'assistant' %}<|assistant|>
{%- set thoughts = m.reasoning_content if m.reasoning_content is string else '' %}
{{ '<think>' + (thoughts.strip() if loop.index0 > ns.last_user else '') + '</think>' }}
{%- if m.content is string and m.content.strip() %}{{ '\\n' + m.content.strip() }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- set f = call.function if call.function else call %}
{{ '\\n<tool_call>' + f.name }}
{% for key, value in f.arguments.items() %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value | tojson(ensure_ascii=False) if value is not string else value }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- elif m.role == 'system' %}<|system|>
{{ m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ '\\n<think></think>' if enable_thinking is defined and not enable_thinking }}{% endif %}
"""

KIMI_K2 = """\
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
    {%- if loop.first and messages[0]['role'] != 'system' -%}<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>{%- endif -%}
    {%- set name = message.get('name') or message['role'] -%}
    {%- if message['role'] == 'tool' -%}
        <|im_system|>{{ name }}<|im_middle|>## Return of {{ message.tool_call_id }}
{{ message['content'] }}
    {%- elif message['role'] == 'assistant' -%}
        <|im_assistant|>{{ name }}<|im_middle|>{{ message['content'] if message['content'] is string }}
        {%- if message.get('tool_calls') -%}
            <|tool_calls_section_begin|>
            {%- for call in message['tool_calls'] -%}
                <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
                {%- if call['function']['arguments'] is string -%}{{ call['function']['arguments'] }}
                {%- else -%}{{ call['function']['arguments'] | tojson }}{%- endif -%}
                <|tool_call_end|>
            {%- endfor -%}
            <|tool_calls_section_end|>
        {%- endif -%}
    {%- else -%}
        <|im_{{ message['role'] }}|>{{ name }}<|im_middle|>{{ message['content'] }}
    {%- endif -%}
    <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""

XML_PARAMETERS = """\
{%- macro item(tag, value) %}{{ '\\n<' ~ tag ~ '>' ~ (value | tojson if value is mapping or value is iterable and value is not string else value | string) ~ '</' ~ tag ~ '>' }}{% endmacro %}
{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- if tools is iterable and tools | length > 0 %}
    {{- "<|im_start|>system\\n" + (system_message | default('You are Qwen.')) + "\\n\\n<tools>" }}
    {%- for tool in tools %}
        {%- set f = tool.function if tool.function is defined else tool %}
        {{- item('name', f.name) }}
        {%- if f.description is defined %}{{- item('description', f.description | trim) }}{%- endif %}
        {%- if f.parameters is defined and f.parameters.properties is mapping %}
            {%- for name, fields in f.parameters.properties | items %}
                {{- item('parameter', name) }}
                {%- for key in fields.keys() | reject('in', ['name', 'description']) %}
                    {{- item(key | replace('-', '_'), fields[key]) }}
                {%- endfor %}
            {%- endfor %}
        {%- endif %}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif system_message is defined %}
    {{- "<|im_start|>system\\n" + system_message + "<|im_end|>\\n" }}
{%- endif %}
{%- for message in rest %}
    {%- if message.role == "assistant" and message.tool_calls is defined and message.tool_calls is iterable and message.tool_calls | length > 0 %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content is defined and message.content is string and message.content | trim | length > 0 %}{{- '\\n' + message.content | trim + '\\n' }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

MINIMAX_M2 = """\
{%- set toolcall_begin_token = '<minimax:tool_call>' -%}
{%- macro visible(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content is iterable and content is not mapping -%}{%- for part in content -%}{{ part.text if part is mapping else part }}{%- endfor -%}
    {%- else -%}{{ content }}{%- endif -%}
{%- endmacro -%}
{{ ']~!b[]~b]system\\n' }}
{%- if messages and messages[0].role == 'system' -%}{{ visible(messages[0].content) }}{%- set messages = messages[1:] -%}{%- endif -%}
{%- for tool in tools or [] -%}{{ '\\n<tool>' ~ (tool.function | tojson(ensure_ascii=False)) ~ '</tool>' }}{%- endfor -%}
{{ '[e~[\\n' }}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{ ']~b]ai\\n' }}
        {%- if message.reasoning_content is string -%}{{ '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' }}{%- endif -%}
        {%- if message.content -%}{{ visible(message.content) }}{%- endif -%}
        {%- if message.tool_calls -%}
            {{ '\\n' ~ toolcall_begin_token ~ '\\n' }}
            {%- for call in message.tool_calls -%}
                {%- if call.function -%}{%- set call = call.function -%}{%- endif -%}
                {{ '<invoke name="' ~ call.name ~ '">' }}
                {%- set _args = call.arguments -%}
                {%- for key, value in _args.items() -%}
                    {{ '<parameter name="' ~ key ~ '">' ~ (value | tojson(ensure_ascii=False) if value is not string else value) ~ '</parameter>' }}
                {%- endfor -%}
                {{ '</invoke>\\n' }}
            {%- endfor -%}
            {{ '</minimax:tool_call>' }}
        {%- endif -%}
        {{ '[e~[\\n' }}
    {%- else -%}
        {{ ']~b]' ~ message.role ~ '\\n' ~ visible(message.content) ~ '[e~[\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ ']~b]ai\\n<think>\\n' }}{%- endif -%}
"""

GPT_OSS = """\
{%- macro typescript(spec) -%}
    {%- if spec.type == 'string' -%}string{%- elif spec.type in ['number', 'integer'] -%}number{%- elif spec.enum -%}{{ spec.enum | join(' | ') }}
    {%- else -%}any{%- endif -%}
{%- endmacro -%}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}
{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort + '\\nCurrent date: ' + strftime_now('%Y') + '<|end|>' }}
{%- if messages[0].role in ['developer', 'system'] %}{%- set instructions = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set instructions = '' %}{%- set rest = messages %}{%- endif %}
{%- if instructions or tools %}
    {{- '<|start|>developer<|message|>' + instructions }}
    {%- if tools %}
        {{- '\\n# Tools\\nnamespace functions {\\n' }}
        {%- for tool in tools %}
            {%- set tool = tool.function %}
            {{- 'type ' + tool.name + ' = (_: {' }}
            {%- for name, spec in (tool.parameters.properties or {}).items() %}{{- name + ': ' + typescript(spec) + ',' }}{%- endfor %}
            {{- '}) => any;\\n' }}
        {%- endfor %}
        {{- '}' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest -%}
    {%- if message.role == 'assistant' -%}
        {%- if message.tool_calls -%}
            {%- set call = message.tool_calls[0].function %}
            {%- if message.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' + (call.arguments | tojson) + '<|call|>' }}
            {%- set last.name = call.name %}
        {%- else -%}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif -%}
    {%- elif message.role == 'tool' -%}
        {%- if last.name is none %}{{- raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}{%- endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' + (message.content | tojson) + '<|end|>' }}
    {%- elif message.role == 'user' -%}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""

MISTRAL_IDS = """\
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set system_message = 'Today is ' + strftime_now('%Y') %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token + '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}
{%- if tools is defined and tools is not none and tools | length > 0 %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if message['content'] is string %}{{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST]' }}
            {%- for block in message['content'] %}
                {%- if block['type'] == 'text' %}{{- block['text'] }}
                {%- else %}{{- raise_exception('Only text and image blocks are supported in message content!') }}{%- endif %}
            {%- endfor %}
            {{- '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {%- if message['content'] is defined and message['content'] is string %}{{- message['content'] }}{%- endif %}
        {%- if message['tool_calls'] is defined and message['tool_calls'] is not none and message['tool_calls'] | length > 0 %}
            {{- '[TOOL_CALLS]' }}
            {%- for call in message['tool_calls'] %}
                {%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
                {{- call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) }}
            {%- endfor %}
        {%- endif %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}
        {%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
        {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + (message['content'] | string) + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user, assistant, system and tool roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""

GRANITE = """\
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Knowledge Cutoff Date: April 2024." %}
    {%- if documents and tools %}{%- set system_message = system_message + " Use tools and documents." %}
    {%- elif thinking %}{%- set system_message = system_message + " Write thoughts between <think></think>." %}{%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- if tools %}{{- '<|start_of_role|>available_tools<|end_of_role|>' }}{{- tools | tojson(indent=4) }}{{- '<|end_of_text|>\\n' }}{%- endif %}
{%- if documents %}
    {%- for document in documents %}
        {{- '<|start_of_role|>document {"document_id": "' + (document['doc_id'] | default(loop.index0) | string) + '"}<|end_of_role|>\\n' + document['text'] + '<|end_of_text|>\\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + ('tool' if message['role'] == 'tool_response' else message['role']) + '<|end_of_role|>' + (message['content'] or '') }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}
    {%- endif %}
    {{- '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant' }}{%- if controls %}{{- ' ' + controls | tojson() }}{%- endif %}{{- '<|end_of_role|>' }}{%- endif %}
{%- endfor %}"""

GEMMA_CALLS = """\
{{ bos_token }}{%- if tools -%}{{ '<start_of_turn>developer\\n' }}{%- for tool in tools -%}
{{ '<declaration:' + tool['function']['name'] + '{' }}
{%- for key, value in (tool['function'].get('parameters', {}).get('properties', {}) | dictsort) -%}{{ key }}:{{ value['type'] if value['type'] is string else value['type'] | join('|') }},{%- endfor -%}{{ '}>' }}
{%- endfor -%}{{ '<end_of_turn>\\n' }}{%- endif -%}
{%- for message in messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' }}
    {%- if message.get('content') is string -%}{{ message['content'] | trim }}{%- endif -%}
    {%- for call in message.get('tool_calls', []) -%}
        {{ '<start_function_call>call:' + call['function']['name'] + '{' }}
        {%- for key, value in call['function']['arguments'] | dictsort -%}{{ key }}:{{ '<escape>' + value + '<escape>' if value is string else value }}{{ ',' if not loop.last }}{%- endfor -%}
        {{ '}<end_function_call>' }}
    {%- endfor -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

TOOLS_IN_SYSTEM = """\
{%- if messages[0]['role'] == 'system' -%}<|system|>{{ messages[0]['content'] }}{% if tools %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif %}<|end|>{%- elif tools -%}<|system|><|tool|>{{ tools | tojson }}<|/tool|><|end|>{%- endif -%}
{%- for message in messages if message['role'] != 'system' -%}
    {{ '<|' + message['role'] + '|>' + (message['content'] | default('', true)) }}
    {%- if message['tool_calls'] -%}<|tool_call|>[{%- for call in message['tool_calls'] -%}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ ', ' if not loop.last }}{%- endfor -%}]<|/tool_call|>{%- endif -%}
    <|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""

FAMILY_TEMPLATES = {name: source for name, source in globals().items() if name.isupper()}
