"""OpenAI's Responses API: requests, answers as items and semantic events, and the store of answers to go on from."""
