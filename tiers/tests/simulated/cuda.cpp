// A CUDA driver for tests on machines without a GPU: it keeps the contract that the CUDA backend relies on, with
// the CPU's memory for the GPU's. Work goes through streams, each a thread of its own that takes its time;
// kernels are the same source, run thread by thread. It refuses what a GPU could not do: a call without a
// context, a copy from memory that is neither the device's nor locked, a launch of a kernel that does not exist.
// Like a real one it ends a stream's capture when a thread that has not asked to be let makes a call that could
// disturb it.
//
// KVBM_SIMULATED names a fault, until `simulated_fault` names another: no-device, old-driver, out-of-memory,
// copies-fail, streams-hang, no-lock, no-lock-to-read, queries-fail (the first hundred), rows-refused. The macro
// WITHOUT_BATCHES leaves out the symbol of batched copies, WITHOUT_LOCK one that is needed. `simulated_…` are for
// tests: what no driver would tell.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

// What kernels see of their place in a launch.
struct Place {
    uint32_t x, y, z;
};
static thread_local Place threadIdx, blockIdx, blockDim, gridDim;

#define __global__
#define __device__
#define __forceinline__ inline

// Groups that added to a checksum since the last question.
static std::mutex &summing_lock = *new std::mutex;
static std::set<std::pair<uint32_t, uint32_t>> &summing = *new std::set<std::pair<uint32_t, uint32_t>>;
static uint32_t atomicXor(uint32_t *address, uint32_t value) {
    std::lock_guard<std::mutex> guard(summing_lock);
    summing.emplace(blockIdx.x, blockIdx.y);
    return __atomic_fetch_xor(address, value, __ATOMIC_RELAXED);
}

#include KERNELS

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_CONTEXT = 201, NOT_FOUND = 500,
       NOT_READY = 600, LAUNCH_FAILED = 719, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
       CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURED_EVENT = 907 };
enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };

static std::atomic<const char *> chosen_fault{getenv("KVBM_SIMULATED")};
static bool fault(const char *name) {
    const char *chosen = chosen_fault;
    return chosen && std::string(chosen) == name;
}
extern "C" __attribute__((visibility("default"))) void simulated_fault(const char *name) { chosen_fault = name; }

// Never destroyed, since threads may call the driver until the process is gone.
static std::mutex &lock = *new std::mutex;
// Memory that the GPU can address: start and size.
static std::map<uintptr_t, size_t> &known = *new std::map<uintptr_t, size_t>;
static std::atomic<int> sticky{SUCCESS};
static thread_local std::vector<void *> &contexts = *new std::vector<void *>;
static bool has_context() { return !contexts.empty() && contexts.back() == &sticky; }

struct Stream;
// Captures under way: the stream, the thread that began, how strict it is.
struct Capture {
    std::thread::id owner;
    int mode;
    bool invalid;
};
static std::map<Stream *, Capture> &captures = *new std::map<Stream *, Capture>;
static thread_local int capture_mode = GLOBAL;

// What a call that could disturb a capture comes to. A call that is refused ends the capture besides.
static int disturb() {
    std::lock_guard<std::mutex> guard(lock);
    if (capture_mode == RELAXED) return SUCCESS;
    int outcome = SUCCESS;
    for (auto &capture : captures) {
        const bool own = capture.second.owner == std::this_thread::get_id();
        const bool strict = own ? capture.second.mode != RELAXED : capture.second.mode == GLOBAL && capture_mode == GLOBAL;
        if (!strict) continue;
        capture.second.invalid = true;
        outcome = CAPTURE_UNSUPPORTED;
    }
    return outcome;
}
static std::atomic<long> allocations{0};

static bool addressable(uintptr_t start, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    auto after = known.upper_bound(start);
    if (after == known.begin()) return false;
    --after;
    return start + bytes <= after->first + after->second;
}

static int remember(uintptr_t start, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    return known.emplace(start, bytes).second ? SUCCESS : ALREADY_REGISTERED;
}

static int forget(uintptr_t start) {
    std::lock_guard<std::mutex> guard(lock);
    return known.erase(start) ? SUCCESS : NOT_REGISTERED;
}

// Streams that are about to work: all that have work, if they hang.
static std::atomic<int64_t> hanging{0};
extern "C" __attribute__((visibility("default"))) int64_t simulated_streams_hanging() { return hanging; }

// Does its work in order, on a thread, and not at once.
struct Stream {
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<void()>> work;
    bool closing = false, busy = false;
    std::thread thread{[this] { serve(); }};

    void serve() {
        std::unique_lock<std::mutex> guard(lock);
        unsigned step = 0;
        while (true) {
            changed.wait(guard, [this] { return closing || !work.empty(); });
            if (work.empty()) return;
            auto next = std::move(work.front());
            work.pop_front();
            busy = true;
            guard.unlock();
            hanging++;
            while (fault("streams-hang")) std::this_thread::sleep_for(std::chrono::milliseconds(10));
            hanging--;
            if (++step % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(step % 50));
            next();
            guard.lock();
            busy = false;
            changed.notify_all();
        }
    }
    void push(std::function<void()> next) {
        std::lock_guard<std::mutex> guard(lock);
        work.push_back(std::move(next));
        changed.notify_all();
    }
    void drain() {
        std::unique_lock<std::mutex> guard(lock);
        changed.wait(guard, [this] { return work.empty() && !busy; });
    }
    ~Stream() {
        {
            std::lock_guard<std::mutex> guard(lock);
            closing = true;
            changed.notify_all();
        }
        thread.join();
    }
};

// The last record of an event that is used for many.
struct Event {
    std::shared_ptr<std::atomic<bool>> passed;
    bool captured = false;
};

static bool is_capturing(Stream *stream) {
    std::lock_guard<std::mutex> guard(lock);
    return captures.count(stream) != 0;
}

#define API extern "C" __attribute__((visibility("default"))) int
#define NEEDS_CONTEXT \
    if (!has_context()) return INVALID_CONTEXT; \
    if (sticky != SUCCESS) return sticky
#define COULD_DISTURB \
    if (int refused = disturb()) return refused
#define ALLOCATES \
    NEEDS_CONTEXT; \
    COULD_DISTURB; \
    allocations++

API cuInit(unsigned) { return fault("no-device") ? NO_DEVICE : SUCCESS; }
API cuDriverGetVersion(int *version) { return *version = fault("old-driver") ? 11040 : 12080, SUCCESS; }
API cuDeviceGetCount(int *count) { return *count = 1, SUCCESS; }
API cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal == 0 ? SUCCESS : NO_DEVICE; }
API cuDeviceGetName(char *name, int length, int) { return strncpy(name, "simulated", length), SUCCESS; }
API cuDeviceTotalMem_v2(size_t *bytes, int) { return *bytes = size_t(8) << 30, SUCCESS; }
API cuDeviceGetAttribute(int *value, int attribute, int) {
    *value = attribute == 75 ? 9 : 0;
    return SUCCESS;
}
API cuDevicePrimaryCtxRetain(void **context, int) { return *context = &sticky, SUCCESS; }
API cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
API cuCtxSetCurrent(void *context) {
    if (!contexts.empty()) contexts.pop_back();
    if (context) contexts.push_back(context);
    return SUCCESS;
}
API cuCtxGetCurrent(void **context) { return *context = contexts.empty() ? nullptr : contexts.back(), SUCCESS; }
API cuCtxPushCurrent_v2(void *context) {
    if (!context) return INVALID_CONTEXT;
    return contexts.push_back(context), SUCCESS;
}
API cuCtxPopCurrent_v2(void **context) {
    if (contexts.empty()) return INVALID_CONTEXT;
    if (context) *context = contexts.back();
    return contexts.pop_back(), SUCCESS;
}
API cuThreadExchangeStreamCaptureMode(int *mode) {
    if (*mode < GLOBAL || *mode > RELAXED) return INVALID_VALUE;
    return std::swap(*mode, capture_mode), SUCCESS;
}
// NVRTC asks for it, and does without.
API cuGetExportTable(const void **table, const void *) { return *table = nullptr, NOT_FOUND; }
API cuGetErrorName(int, const char **text) { return *text = "simulated", SUCCESS; }
API cuGetErrorString(int, const char **text) { return *text = "a simulated failure", SUCCESS; }

API cuMemAlloc_v2(uintptr_t *address, size_t bytes) {
    ALLOCATES;
    if (fault("out-of-memory") || bytes > size_t(8) << 30) return OUT_OF_MEMORY;
    *address = (uintptr_t)aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    memset((void *)*address, 0xa5, bytes);
    return remember(*address, bytes);
}
API cuMemFree_v2(uintptr_t address) {
    NEEDS_CONTEXT;
    COULD_DISTURB;
    const int known_once = forget(address);
    if (known_once == SUCCESS) free((void *)address);
    return known_once;
}
API cuMemHostAlloc(void **start, size_t bytes, unsigned) {
    ALLOCATES;
    *start = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return remember((uintptr_t)*start, bytes);
}
API cuMemFreeHost(void *start) { return cuMemFree_v2((uintptr_t)start); }
#ifndef WITHOUT_LOCK
API cuMemHostRegister_v2(void *start, size_t bytes, unsigned flags) {
    ALLOCATES;
    const unsigned read_only = 8;
    const bool refused = fault("no-lock") || (fault("no-lock-to-read") && flags & read_only);
    return refused ? OUT_OF_MEMORY : remember((uintptr_t)start, bytes);
}
#endif
API cuMemHostUnregister(void *start) {
    COULD_DISTURB;
    return forget((uintptr_t)start);
}
API cuMemHostGetDevicePointer_v2(uintptr_t *mapped, void *start, unsigned) {
    *mapped = (uintptr_t)start;
    return addressable(*mapped, 1) ? SUCCESS : NOT_REGISTERED;
}

API cuStreamCreate(Stream **stream, unsigned) {
    NEEDS_CONTEXT;
    allocations++;
    return *stream = new Stream, SUCCESS;
}
API cuStreamDestroy_v2(Stream *stream) { return delete stream, SUCCESS; }
API cuStreamSynchronize(Stream *stream) {
    COULD_DISTURB;
    return stream->drain(), sticky.load();
}
API cuStreamBeginCapture_v2(Stream *stream, int mode) {
    NEEDS_CONTEXT;
    std::lock_guard<std::mutex> guard(lock);
    return captures.emplace(stream, Capture{std::this_thread::get_id(), mode, false}).second ? SUCCESS : INVALID_VALUE;
}
API cuStreamEndCapture(Stream *stream, void **graph) {
    std::lock_guard<std::mutex> guard(lock);
    const auto capture = captures.find(stream);
    if (capture == captures.end()) return INVALID_VALUE;
    const bool invalid = capture->second.invalid;
    captures.erase(capture);
    return *graph = nullptr, invalid ? CAPTURE_INVALIDATED : SUCCESS;
}
API cuStreamIsCapturing(Stream *stream, int *status) {
    std::lock_guard<std::mutex> guard(lock);
    const auto capture = captures.find(stream);
    return *status = capture == captures.end() ? 0 : capture->second.invalid ? 2 : 1, SUCCESS;
}

API cuEventCreate(Event **event, unsigned) {
    NEEDS_CONTEXT;
    allocations++;
    return *event = new Event, SUCCESS;
}
API cuEventDestroy_v2(Event *event) { return delete event, SUCCESS; }
API cuEventRecord(Event *event, Stream *stream) {
    NEEDS_CONTEXT;
    const bool captured = is_capturing(stream);
    const auto passed = std::make_shared<std::atomic<bool>>(false);
    {
        std::lock_guard<std::mutex> guard(lock);
        event->captured = captured;
        event->passed = passed;
    }
    if (!captured) stream->push([passed] { *passed = true; });
    return SUCCESS;
}
// The state of the last record: passed, or captured and never to pass by itself.
static std::shared_ptr<std::atomic<bool>> record_of(Event *event, bool *captured) {
    std::lock_guard<std::mutex> guard(lock);
    *captured = event->captured;
    return event->passed;
}
API cuEventQuery(Event *event) {
    COULD_DISTURB;
    static std::atomic<int> queries{0};
    if (fault("queries-fail") && queries++ < 100) return CAPTURE_UNSUPPORTED;
    bool captured = false;
    const auto passed = record_of(event, &captured);
    if (captured) return CAPTURED_EVENT;
    return sticky != SUCCESS ? sticky.load() : passed && !*passed ? NOT_READY : SUCCESS;
}
API cuEventSynchronize(Event *event) {
    COULD_DISTURB;
    bool captured = false;
    const auto passed = record_of(event, &captured);
    if (captured) return CAPTURED_EVENT;
    while (passed && !*passed) std::this_thread::yield();
    return sticky;
}
// Waits for what is recorded by now: a later record does not matter.
API cuStreamWaitEvent(Stream *stream, Event *event, unsigned) {
    NEEDS_CONTEXT;
    bool captured = false;
    const auto passed = record_of(event, &captured);
    if (captured) return CAPTURED_EVENT;
    if (passed) stream->push([passed] {
        while (!*passed) std::this_thread::yield();
    });
    return SUCCESS;
}
API cuLaunchHostFunc(Stream *stream, void (*function)(void *), void *argument) {
    NEEDS_CONTEXT;
    stream->push([=] { function(argument); });
    return SUCCESS;
}
API cuEventElapsedTime(float *milliseconds, Event *, Event *) { return *milliseconds = 1, SUCCESS; }

API cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t bytes, Stream *stream) {
    NEEDS_CONTEXT;
    if (!addressable(to, bytes) || !addressable(from, bytes)) return INVALID_VALUE;
    stream->push([=] {
        if (fault("copies-fail")) sticky = LAUNCH_FAILED;
        else memcpy((void *)to, (void *)from, bytes);
    });
    return SUCCESS;
}
API cuMemGetAddressRange_v2(uintptr_t *start, size_t *bytes, uintptr_t address) {
    NEEDS_CONTEXT;
    std::lock_guard<std::mutex> guard(lock);
    auto found = known.upper_bound(address);
    if (found == known.begin() || (--found)->first + found->second <= address) return NOT_FOUND;
    *start = found->first;
    if (bytes) *bytes = found->second;
    return SUCCESS;
}
struct Rows {
    size_t from_x, from_y;
    int from_kind;
    uintptr_t from_host, from;
    void *from_array;
    size_t from_pitch;
    size_t to_x, to_y;
    int to_kind;
    uintptr_t to_host, to;
    void *to_array;
    size_t to_pitch, width, height;
};
API cuMemcpy2DAsync_v2(const Rows *rows, Stream *stream) {
    const int unified = 4;
    if (fault("rows-refused") || rows->from_kind != unified || rows->to_kind != unified) return INVALID_VALUE;
    if (rows->height > 1 && (rows->width > rows->from_pitch || rows->width > rows->to_pitch)) return INVALID_VALUE;
    if (rows->from_pitch > INT32_MAX || rows->to_pitch > INT32_MAX) return INVALID_VALUE;
    const size_t last = rows->height ? rows->height - 1 : 0;
    if (!addressable(rows->from, last * rows->from_pitch + rows->width)) return INVALID_VALUE;
    if (!addressable(rows->to, last * rows->to_pitch + rows->width)) return INVALID_VALUE;
    for (size_t row = 0; row < rows->height; row++) {
        const uintptr_t to = rows->to + row * rows->to_pitch, from = rows->from + row * rows->from_pitch;
        if (int error = cuMemcpyAsync(to, from, rows->width, stream)) return error;
    }
    return SUCCESS;
}
API cuMemsetD8Async(uintptr_t start, unsigned char value, size_t bytes, Stream *stream) {
    NEEDS_CONTEXT;
    if (!addressable(start, bytes)) return INVALID_VALUE;
    stream->push([=] { memset((void *)start, value, bytes); });
    return SUCCESS;
}
#ifndef WITHOUT_BATCHES
API cuMemcpyBatchAsync(uintptr_t *to, uintptr_t *from, size_t *bytes, size_t count, void *attributes, size_t *first,
                       size_t kinds, size_t *failed, Stream *stream) {
    NEEDS_CONTEXT;
    if (!attributes || kinds != 1 || first[0] != 0 || !stream) return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        if (int error = cuMemcpyAsync(to[i], from[i], bytes[i], stream)) return *failed = i, error;
    }
    return SUCCESS;
}
#endif

API cuModuleLoadData(void **module, const void *image) {
    ALLOCATES;
    *module = (void *)image;
    return strstr((const char *)image, ".entry kvbm_copy_pieces") ? SUCCESS : INVALID_VALUE;
}
API cuModuleUnload(void *) { return SUCCESS; }

// A kernel with its arguments, which a launch copies.
typedef std::function<void()> Call;
typedef Call (*Binder)(void **);
template <typename T> static T argument(void *pointer) { return *(T *)pointer; }
static Call copy_pieces(void **arguments) {
    auto pieces = argument<const Piece *>(arguments[0]);
    auto count = argument<u32>(arguments[1]);
    return [=] { kvbm_copy_pieces(pieces, count); };
}
static Call transform_blocks(void **arguments) {
    auto from = argument<u64>(arguments[0]), to = argument<u64>(arguments[1]);
    auto pairs = argument<const Pair *>(arguments[2]);
    auto count = argument<u32>(arguments[3]), unit = argument<u32>(arguments[4]);
    auto plan = argument<Plan>(arguments[5]);
    return [=] { kvbm_transform(from, to, pairs, count, unit, plan); };
}
static Call crc32c(void **arguments) {
    auto summands = argument<const Summand *>(arguments[0]);
    auto count = argument<u32>(arguments[1]);
    auto sums = argument<u32 *>(arguments[2]);
    return [=] { kvbm_crc32c(summands, count, sums); };
}
static const std::map<std::string, Binder> &kernels = *new std::map<std::string, Binder>{
    {"kvbm_copy_pieces", copy_pieces}, {"kvbm_transform", transform_blocks}, {"kvbm_crc32c", crc32c}};

API cuModuleGetFunction(Binder *function, void *, const char *name) {
    const auto found = kernels.find(name);
    if (found == kernels.end()) return NOT_FOUND;
    return *function = found->second, SUCCESS;
}
API cuLaunchKernel(Binder function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned, Stream *stream, void **arguments, void **) {
    NEEDS_CONTEXT;
    if (!gx || !gy || gz != 1 || !bx || bx > 1024 || by != 1 || bz != 1 || !stream) return INVALID_VALUE;
    const Call call = function(arguments);
    stream->push([=] {
        if (fault("copies-fail")) {
            sticky = LAUNCH_FAILED;
            return;
        }
        gridDim = {gx, gy, 1};
        blockDim = {bx, 1, 1};
        for (blockIdx.y = 0; blockIdx.y < gy; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < gx; blockIdx.x++)
                for (threadIdx.x = 0; threadIdx.x < bx; threadIdx.x++) call();
    });
    return SUCCESS;
}

// Allocations and objects made so far.
extern "C" __attribute__((visibility("default"))) long simulated_allocations() { return allocations; }
// Groups that had part in checksums since the last call.
extern "C" __attribute__((visibility("default"))) long simulated_summing_groups() {
    std::lock_guard<std::mutex> guard(summing_lock);
    const long groups = summing.size();
    summing.clear();
    return groups;
}
