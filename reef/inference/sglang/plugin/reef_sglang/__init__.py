"""Reef's plugin for SGLang: runs inside the engine, imports nothing of Reef, and knows one version of SGLang."""

PLUGIN_VERSION = "2"
SGLANG_VERSION = "0.5.23"
