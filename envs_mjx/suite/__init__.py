"""One module a domain; each offers `TASKS`, its task factories by registry name."""
