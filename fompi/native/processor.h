/* What the processor can do, and the system lets it do. */
#pragma once

enum { ANY_PROCESSOR, X86_64_V3, AVX_512 }; /* each has what those before it have */

int processor_level(void);
