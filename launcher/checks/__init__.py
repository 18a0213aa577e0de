"""`fp4kv check`: does a running SGLang server answer rightly? Asked over HTTP, judged from what is on file."""
