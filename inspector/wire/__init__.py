"""How parties on different machines ask and answer: signed questions, answers signed over them, one store, HTTP."""
