"""`rag-radix selftest`: whether a running server's cached answers are those of a cold one."""
