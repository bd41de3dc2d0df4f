"""The load generator: `tandem bench serve` drives any server that speaks OpenAI, and measures it from outside."""
