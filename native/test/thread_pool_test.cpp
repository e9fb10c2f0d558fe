// Runs many short jobs on thread pools of several sizes, and one job of many items: every item must be computed exactly
// once, and by the time run() returns. Jobs follow each other directly, so that workers are often late. Exits with 1 if
// a job is wrong; built with ThreadSanitizer (`make sanitize` does so), it also detects a late worker that
// computes a chunk of a finished job.
#include "core/thread_pool.h"

#include <algorithm>
#include <cstdio>
#include <vector>

namespace {

constexpr int POOLS = 40, JOBS = 1000, MAX_ITEMS = 97;
constexpr std::int64_t MANY_ITEMS = 200'000;  // more than a job has chunks

bool is_right(fqvit::ThreadPool& pool, int job, std::vector<int>& sums) {
    const std::int64_t items = job * 7 % MAX_ITEMS, chunk = 1 + job % 5;
    pool.run(items, chunk, [&, job](int, std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) sums[static_cast<std::size_t>(i)] += job;
    });
    bool right = true;
    for (std::int64_t i = 0; i < MAX_ITEMS; ++i) {
        right = right && sums[static_cast<std::size_t>(i)] == (i < items ? job : 0);
        sums[static_cast<std::size_t>(i)] = 0;
    }
    return right;
}

}  // namespace

int main() {
    int passed = 0;
    for (int round = 0; round < POOLS; ++round) {
        std::vector<int> sums(MAX_ITEMS);
        fqvit::ThreadPool pool(1 + round % 5);
        for (int job = 1; job <= JOBS; ++job) passed += is_right(pool, job, sums);
    }
    std::vector<int> counts(MANY_ITEMS);
    fqvit::ThreadPool pool(3);
    pool.run(MANY_ITEMS, 1, [&](int, std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) ++counts[static_cast<std::size_t>(i)];
    });
    passed += std::count(counts.begin(), counts.end(), 1) == MANY_ITEMS;
    std::printf("%d passed, %d failed\n", passed, POOLS * JOBS + 1 - passed);
    return passed == POOLS * JOBS + 1 ? 0 : 1;
}
