"""How many KV blocks fit, and where the memory goes: pure functions over numbers. No torch, save to ask a GPU."""
