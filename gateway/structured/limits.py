"""All limits of structured output. Workers have limits of their own: 2 s to compile a grammar."""

#: UTF-8 bytes of a schema, regular expression, grammar, or of all choices together.
MAX_SOURCE_BYTES = 128 << 10
#: Bytes of what is sent to the workers.
MAX_GRAMMAR_BYTES = 512 << 10
#: Values inside values, in a schema or in what it lists.
MAX_DEPTH = 64
#: Properties named in a schema, over all its objects.
MAX_PROPERTIES = 5000
#: Values of `enum`, over the whole schema.
MAX_ENUM_VALUES = 1000
#: Different places of a schema, combinations by `allOf` and `$ref` counted apart.
MAX_NODES = 8000
#: Alternatives of one place, once `anyOf` and `oneOf` beside each other are multiplied out.
MAX_ALTERNATIVES = 256
#: References and `allOf` one behind the other, with nothing between.
MAX_CHAIN = 100
#: Steps in taking a schema apart.
MAX_STEPS = 100_000
#: Steps in comparing listed values and names with patterns; a second of work or two.
MAX_COMPARISONS = 5_000_000
#: Longest bound of a counted repetition: `{n,m}`, `maxLength`, `maxItems`, `maxProperties`.
MAX_REPEAT = 10_000
#: Characters of a regular expression once its counted repetitions are written out.
MAX_REGEX_POSITIONS = 20_000
#: Groups inside groups of a regular expression or grammar.
MAX_GROUP_DEPTH = 32
MAX_CHOICES = 1000
