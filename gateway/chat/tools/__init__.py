"""How model families write tool calls: one module per family, all behind `ToolFormat`. Knows no API and no tokens."""
