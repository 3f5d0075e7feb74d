"""A recurrent net that reads an image row by row, as one reads a page, and then says which digit it was."""

import torch
from torch import nn


class RowReader(nn.Module):
    """(batch, row, column) → a score for each class: an LSTM takes one row a time step; its last memory is judged."""

    def __init__(self, columns: int = 28, classes: int = 10, *, width: int = 64, depth: int = 1):
        super().__init__()
        self.lstm = nn.LSTM(columns, width, num_layers=max(1, depth), batch_first=True)
        self.head = nn.Linear(width, classes)
        for name, bias in self.lstm.named_parameters():
            if name.startswith("bias_hh"):  # the forget gate begins open: keep what you read until you learn better
                nn.init.ones_(bias.data[width : 2 * width])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        memories, _ = self.lstm(rows)  # (batch, row, width)
        return self.head(memories[:, -1])


def read_by_hand(model: RowReader, rows: torch.Tensor) -> torch.Tensor:
    """What the LSTM of one layer computes, written out: each row waits for what was made of the one before."""
    by_row, by_memory, shift, more_shift = model.lstm.parameters()
    memory = state = rows.new_zeros(len(rows), model.lstm.hidden_size)
    for row in rows.unbind(dim=1):  # (batch, column)
        gates = row @ by_row.T + memory @ by_memory.T + shift + more_shift  # (batch, 4 × width)
        take, forget, new, give = gates.chunk(4, dim=1)
        state = forget.sigmoid() * state + take.sigmoid() * new.tanh()
        memory = give.sigmoid() * state.tanh()
    return model.head(memory)
