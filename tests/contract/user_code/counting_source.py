"""A data source of a user's own, without any file: it counts, and takes groups back."""

from miles.utils.types import Sample


class CountingSource:
    def __init__(self, args):
        self.args = args
        self.next = 0
        self.returned = []

    def get_samples(self, num_samples):
        groups = [self.returned.pop(0) for _ in range(min(num_samples, len(self.returned)))]
        while len(groups) < num_samples:
            digits = f"{100_000 + 7 * self.next}"
            groups.append(
                [
                    Sample(group_index=self.next, prompt=f"{digits}=", label=digits[::-1])
                    for _ in range(self.args.n_samples_per_prompt)
                ]
            )
            self.next += 1
        return groups

    def add_samples(self, samples):
        self.returned += samples

    def save(self, rollout_id):
        pass

    def load(self, rollout_id=None):
        pass
