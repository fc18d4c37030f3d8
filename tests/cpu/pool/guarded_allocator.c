/* Preloaded: every block that PyTorch allocates for a CPU tensor ends where a page without access begins.
 *
 * c10 allocates by posix_memalign and frees by free. A block is placed so that its last byte is the last of a page, with an
 * inaccessible page before its first page and behind it; a freed block becomes inaccessible for good. So a kernel that
 * reads or writes outside a result or a temporary tensor, or after it was freed, gets SIGSEGV. The alignment that is asked
 * for is not kept: tensors that begin inside a storage do not have it either.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <sys/mman.h>

#define ARENA (1ul << 40)
#define PAGE 4096ul

extern void __libc_free(void *);

static char *arena;
static unsigned long used;

int posix_memalign(void **result, size_t alignment, size_t size) {
    (void)alignment;
    if (!arena) {
        void *found = mmap(NULL, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED) return ENOMEM;
        arena = found;
        used = PAGE;
    }
    unsigned long pages = size > ARENA ? ARENA : (size + PAGE - 1) / PAGE * PAGE;
    unsigned long start = __atomic_fetch_add(&used, pages + PAGE, __ATOMIC_RELAXED);
    if (start + pages + PAGE > ARENA) {
        __atomic_fetch_sub(&used, pages + PAGE, __ATOMIC_RELAXED);
        return ENOMEM;
    }
    if (pages && mprotect(arena + start, pages, PROT_READ | PROT_WRITE)) return ENOMEM;
    *result = arena + start + pages - size;
    return 0;
}

void free(void *block) {
    char *at = block;
    if (!arena || at < arena || at >= arena + ARENA) {
        __libc_free(block);
        return;
    }
    /* The block's pages end where the next inaccessible page begins: at a multiple of PAGE behind `at`. Its length is
     * unknown, so the first page alone is given back; blocks of these tests are small. */
    char *page = (char *)((unsigned long)at & ~(PAGE - 1));
    mmap(page, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}
