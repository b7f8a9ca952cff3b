"""How parties on machines of their own ask and answer: signed questions, answers signed over them, one store, HTTP."""
