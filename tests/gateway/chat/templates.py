"""Chat templates in the manner of well-known families, and models that have them."""

from collections.abc import Sequence
from pathlib import Path

from gateway.serving import ServingModel
from tests.common.text.model_folders import CHATML, byte_level_folder

#: As Qwen 2.5 and Hermes: calls between tags, arguments as an object.
QWEN = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
{{- 'Functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nAnswer with <tool_call>{...}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- set function = tool_call.function %}
{{- '\\n<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{%- if function.arguments is string %}{{- function.arguments }}{%- else %}{{- function.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

#: As Qwen 3: thoughts of the last turn are shown, contents lose line breaks in front; thinking can be switched off.
QWEN_THINKING = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content %}
{%- set thoughts = message.reasoning_content if message.reasoning_content is string else '' %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.last or thoughts %}
{{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{{- '\\n<tool_call>\\n' + tool_call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if tools %}{{- 'tools: ' + tools | tojson }}{%- endif %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

#: As the distilled DeepSeek R1: the prompt opens the thoughts.
R1 = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + message.content.split('</think>')[-1] }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<think>\\n' }}{%- endif %}
"""

#: As Llama 3.1: everything is trimmed, one call per message, results have a role of their own.
LLAMA = """\
{%- set system = '' %}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}
{{- 'Respond as {"name": function name, "parameters": dictionary}.\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call at a time!') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson + '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

#: As Mistral 7B v0.3: turns must alternate, ids must have nine letters.
MISTRAL = """\
{%- for message in messages if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.first %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.id | length != 9 %}{{- raise_exception('ids have length 9!') }}{%- endif %}
{%- set call = tool_call.function | tojson %}
{{- call[:-1] + ', "id": "' + tool_call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}
{%- endfor %}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids have length 9!') }}{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | tojson }}
{{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}
"""

#: As newer Mistral models.
MISTRAL_NAMED = """\
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
{%- for call in message.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
{%- else %}{{- '[' + message.role + ']' + message.content }}{%- endfor %}
{%- endfor %}
"""

#: As those between the two: an id before the arguments.
MISTRAL_IDS = MISTRAL_NAMED.replace("+ '[ARGS]'", "+ '[CALL_ID]' + call.id + '[ARGS]'")

TEMPLATES = {
    "chatml": CHATML,
    "qwen": QWEN,
    "qwen thinking": QWEN_THINKING,
    "r1": R1,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral named": MISTRAL_NAMED,
    "mistral ids": MISTRAL_IDS,
}
MISTRAL_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[INST]", "[/INST]")
LLAMA_MARKS = ("<|python_tag|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
#: Ids of every model made here are below this.
VOCAB_SIZE = 420


def chat_model(
    folder: Path,
    template: str | None,
    special: Sequence[str] = (),
    *,
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
) -> ServingModel:
    """A tiny tokenizer with this template and further special tokens."""
    byte_level_folder(folder, template=template, special=special)
    return ServingModel.load(folder, "tiny", tool_parser=tool_parser, reasoning_parser=reasoning_parser)
