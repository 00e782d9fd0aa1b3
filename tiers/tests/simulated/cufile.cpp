// cuFile for tests on machines without GPUDirect Storage: the simulated GPU's memory is the CPU's, so reads and
// writes are ordinary ones. It insists on what cuFile insists on: registered files, opened with no more flags than it
// takes (as seen of cuFile 1.15), offsets into buffers that are registered. KVBM_SIMULATED names a fault: cufile-hangs, cufile-fails, cufile-compatible, cufile-short,
// cufile-no-files, cufile-pins-little. `simulated_transfers_at_once` is for tests.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

struct Status {
    int file, driver;
};
struct Description {
    int type;
    union {
        int fd;
        void *handle;
    };
    const void *operations;
};
struct Properties {
    unsigned major, minor;
    size_t poll_threshold, direct_io_size;
    unsigned status, control;
    unsigned features, cache, buffer_cache, pinned, batch, batch_timeout;
};

static bool fault(const char *name) {
    const char *chosen = getenv("KVBM_SIMULATED");
    return chosen && std::string(chosen) == name;
}

// Never destroyed, since threads may call the library until the process is gone.
static std::mutex &lock = *new std::mutex;
static std::map<uintptr_t, size_t> &buffers = *new std::map<uintptr_t, size_t>;

#define API extern "C" __attribute__((visibility("default")))

API Status cuFileDriverOpen() {
    while (fault("cufile-hangs")) std::this_thread::sleep_for(std::chrono::seconds(1));
    return {fault("cufile-fails") ? 5010 : 0, 0};
}
API Status cuFileDriverGetProperties(Properties *properties) {
    memset(properties, 0, sizeof *properties);
    properties->status = fault("cufile-compatible") ? 1 << 2 : 1 << 4;
    properties->pinned = fault("cufile-pins-little") ? 4 : 32 << 20;
    return {0, 0};
}
API Status cuFileHandleRegister(void **handle, Description *description) {
    if (description->type != 1 || fault("cufile-no-files")) return {5018, 0};
    const int flags = fcntl(description->fd, F_GETFL);
    if (flags & (O_TMPFILE | O_NOFOLLOW | O_APPEND | O_NONBLOCK)) return {5019, 0};
    if (!(flags & O_DIRECT)) return {5020, 0};
    // For transfers that are not aligned it opens the file again, by its name.
    char name[4096] = "";
    if (readlink(("/proc/self/fd/" + std::to_string(description->fd)).c_str(), name, sizeof name - 1) < 0) return {5031, 0};
    const int again = open(name, O_RDWR);
    if (again < 0) return {5031, 0};
    close(again);
    *handle = new int(description->fd);
    return {0, 0};
}
API void cuFileHandleDeregister(int *handle) { delete handle; }
API Status cuFileBufRegister(const void *base, size_t bytes, int) {
    std::lock_guard<std::mutex> guard(lock);
    if (fault("cufile-pins-little") && bytes > 4096) return {5026, 0};
    return {buffers.emplace((uintptr_t)base, bytes).second ? 0 : 5023, 0};
}
API Status cuFileBufDeregister(const void *base) {
    std::lock_guard<std::mutex> guard(lock);
    return {buffers.erase((uintptr_t)base) ? 0 : 5024, 0};
}

// Whether a transfer names a registered buffer and stays in it, or names memory itself.
static bool is_sound(void *base, size_t bytes, off_t offset) {
    std::lock_guard<std::mutex> guard(lock);
    const auto buffer = buffers.find((uintptr_t)base);
    return buffer == buffers.end() ? offset == 0 : offset + bytes <= buffer->second;
}

// Pages of files that transfers work on now. cuFile does not keep two writers of one page apart.
struct Span {
    ino_t file;
    off_t start, end;
    bool writes;
};
static std::vector<Span> &spans = *new std::vector<Span>;
static size_t most_at_once = 0;
static bool begin(const Span &span) {
    std::lock_guard<std::mutex> guard(lock);
    for (const Span &other : spans) {
        const bool overlaps = other.file == span.file && other.start < span.end && span.start < other.end;
        if (overlaps && (other.writes || span.writes)) return false;
    }
    spans.push_back(span);
    most_at_once = std::max(most_at_once, spans.size());
    return true;
}
static void end(const Span &span) {
    std::lock_guard<std::mutex> guard(lock);
    spans.erase(std::find_if(spans.begin(), spans.end(), [&](const Span &other) {
        return other.file == span.file && other.start == span.start && other.end == span.end && other.writes == span.writes;
    }));
}
// Since the last call.
extern "C" __attribute__((visibility("default"))) long simulated_transfers_at_once() {
    std::lock_guard<std::mutex> guard(lock);
    const long most = most_at_once;
    return most_at_once = 0, most;
}

// The slot files are opened with O_DIRECT: transfers go through an aligned copy, as cuFile's unaligned ones do, and
// take their time.
static ssize_t transfer(int *handle, void *base, size_t bytes, off_t at, off_t offset, bool reads) {
    if (!is_sound(base, bytes, offset)) return -5014;
    const off_t start = at / 4096 * 4096;
    const size_t span = (at + bytes - start + 4095) / 4096 * 4096;
    struct stat stat;
    if (fstat(*handle, &stat)) return -1;
    const Span taken{stat.st_ino, start, start + off_t(span), !reads};
    if (!begin(taken)) return -5099;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    char *const pages = (char *)aligned_alloc(4096, span), *const inside = pages + (at - start);
    char *const memory = (char *)base + offset;
    bool whole = pread(*handle, pages, span, start) == (ssize_t)span;
    if (whole && reads) memcpy(memory, inside, bytes);
    if (whole && !reads) {
        memcpy(inside, memory, bytes);
        whole = pwrite(*handle, pages, span, start) == (ssize_t)span;
    }
    free(pages);
    end(taken);
    if (!whole) return -1;
    return fault("cufile-short") ? bytes - 1 : bytes;
}
API ssize_t cuFileRead(int *handle, void *base, size_t bytes, off_t at, off_t offset) {
    return transfer(handle, base, bytes, at, offset, true);
}
API ssize_t cuFileWrite(int *handle, const void *base, size_t bytes, off_t at, off_t offset) {
    return transfer(handle, (void *)base, bytes, at, offset, false);
}
