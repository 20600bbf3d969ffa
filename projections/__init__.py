"""Read models: functions of journal blocks, each with its cursor where its rows are."""
